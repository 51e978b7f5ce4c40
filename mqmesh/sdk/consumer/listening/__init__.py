"""How messages are given to listeners, and what becomes of those that failed."""
