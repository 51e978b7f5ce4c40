"""One folder per process. Roles share `process.py` and never import one another."""
