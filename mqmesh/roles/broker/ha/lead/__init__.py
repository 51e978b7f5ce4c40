"""Keeping the lead of a group, and handing it over. Pure."""
