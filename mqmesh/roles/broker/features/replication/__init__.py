"""Followers of a master: they get its log, and say how far they are."""
