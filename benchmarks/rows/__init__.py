"""Benchmarks: rows of figures, each beside what a bare ZeroMQ program reaches."""
