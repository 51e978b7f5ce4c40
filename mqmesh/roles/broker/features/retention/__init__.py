"""Passes of retention that administrators ask for."""
