"""A stopped store: verify, read, rebuild, snapshot."""
