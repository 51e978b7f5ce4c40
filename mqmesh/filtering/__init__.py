"""Which messages a subscription wants. Pure: no socket, no file, no clock."""
