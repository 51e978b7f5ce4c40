"""What a broker can do, a folder a feature: its table, its rules, its handlers."""
