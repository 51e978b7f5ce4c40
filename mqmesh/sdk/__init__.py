"""The clients that users import: producers and consumers."""
