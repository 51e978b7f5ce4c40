"""Clients of administrators: queries and changes."""
