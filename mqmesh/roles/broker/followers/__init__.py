"""Followers of a master, and which of them consumers should read from. Pure."""
