"""A broker for FastStream: setup.cfg pins a range, for its base classes are not public."""
