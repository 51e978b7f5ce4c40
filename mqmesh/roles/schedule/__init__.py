"""The schedule service: tells its broker which delayed messages are due."""
