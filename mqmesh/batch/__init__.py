"""The record batch: header, meta and payload, its kinds, and their codecs."""
