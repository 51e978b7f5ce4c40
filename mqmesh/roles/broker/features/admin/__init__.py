"""For administrators: topics, figures, single messages."""
