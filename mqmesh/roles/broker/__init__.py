"""The broker: keeps messages and hands them out. Read `all_features.py` first."""
