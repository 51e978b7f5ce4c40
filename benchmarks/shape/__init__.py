"""The shape of the code in numbers: what a message passes through, and what a reader meets."""
