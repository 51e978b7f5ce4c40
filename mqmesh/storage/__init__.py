"""What stays on disk: the message store, its files and their recovery."""
