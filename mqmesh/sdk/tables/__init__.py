"""Tables of keys and values, which brokers keep in topics."""
