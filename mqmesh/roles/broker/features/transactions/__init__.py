"""Transactions: half messages, decisions, check-backs."""
