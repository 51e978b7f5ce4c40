"""Delayed messages: admission, and what the schedule service asks."""
