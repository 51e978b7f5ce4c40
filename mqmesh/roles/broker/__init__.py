"""The broker: keeps messages and hands them out. Read `dispatch.py` first."""
