"""The name server: which broker serves which topic, and who has gone silent."""
