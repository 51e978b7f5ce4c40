"""The message index: follows the log, and finds messages by key and id."""
