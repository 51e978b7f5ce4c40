"""Producers: buffer, lanes, sender, the direct path, requests."""
