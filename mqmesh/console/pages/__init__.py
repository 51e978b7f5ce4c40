"""Pages of the console: a module a subject, whose ``ROUTES`` are found by their name."""
