"""Replies to requests."""
