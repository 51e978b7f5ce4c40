"""Files and folders: written as a whole, locked, open within a limit."""
