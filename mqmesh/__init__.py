"""mqmesh: a message queue for Python teams, on ZeroMQ."""

__version__ = "0.1.0"
