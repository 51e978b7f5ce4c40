"""Sends: admission, staging, the answer."""
