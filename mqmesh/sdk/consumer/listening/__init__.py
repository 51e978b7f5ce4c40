"""Calls of listeners, and retries of messages that failed."""
