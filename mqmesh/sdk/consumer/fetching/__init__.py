"""Pulls, and the buffers that hold messages until they are taken."""
