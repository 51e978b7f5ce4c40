"""The wire protocol: codes, commands and their bytes. No sockets."""
