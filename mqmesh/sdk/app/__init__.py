"""Typed handlers: functions that are called with decoded bodies."""
