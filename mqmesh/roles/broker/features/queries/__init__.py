"""Look-ups by key, id and offset."""
