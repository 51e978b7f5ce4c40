"""Consumers: membership, assignment, offsets."""
