"""Message store: its files and their recovery."""
