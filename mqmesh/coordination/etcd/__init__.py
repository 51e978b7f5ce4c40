"""The client of etcd, ``etcd://host:port,host:port,…``, over its JSON gateway; no library."""
