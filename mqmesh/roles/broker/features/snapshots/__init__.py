"""Snapshots of the running store."""
