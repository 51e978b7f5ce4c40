"""Actions of the console: a plan first, then the deed."""
