"""The schedule service: reports to its broker which delayed messages are due."""
