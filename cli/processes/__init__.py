"""Processes of roles: one alone, or a whole cluster on this machine."""
