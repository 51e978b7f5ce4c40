"""The index process of a broker, as the broker sees it."""
