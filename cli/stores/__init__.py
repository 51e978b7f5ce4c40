"""Stores, their snapshots and their archives."""
