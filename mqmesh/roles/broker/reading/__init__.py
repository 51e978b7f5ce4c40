"""Batches of the store that a subscription wants. Pure."""
