"""Transaction producers: half messages, their ends, and check-backs."""
