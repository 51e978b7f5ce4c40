"""Whole clusters of real roles and clients in one thread, on one clock, from one seed."""
