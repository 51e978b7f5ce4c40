"""State of topics, which several features use."""
