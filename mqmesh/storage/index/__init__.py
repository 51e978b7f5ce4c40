"""The message index: what follows the log, and finds messages by key and id."""
