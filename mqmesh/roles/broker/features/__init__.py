"""Features of a broker, a folder each: its table, its rules, its handlers."""
