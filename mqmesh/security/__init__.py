"""Security: keys, the access list, and the checks of connections and requests."""
