"""The broker's index process: follows the log, read-only, and answers look-ups."""
