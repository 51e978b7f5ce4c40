"""Putting into the store, once a turn, for all features that write."""
