"""Pulls: filters, waiting, turns."""
