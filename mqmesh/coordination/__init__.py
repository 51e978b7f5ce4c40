"""Who leads a broker group: the interface to a coordination engine, and its implementations."""
