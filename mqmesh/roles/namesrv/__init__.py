"""The name server: which broker serves which topic, and which has gone silent."""
