"""Fakes and real-process helpers, for our tests and for those of our users."""
