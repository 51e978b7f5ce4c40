"""Messages sent back: retries and dead letters."""
