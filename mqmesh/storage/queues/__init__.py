"""Structures derived from the log: consume queues, queue tables, producer states."""
