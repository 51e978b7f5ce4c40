"""Leadership of broker groups: the interface to a coordination engine, and its implementations."""
