"""Writes of a turn of the loop: staged, put at once, answered when they are safe."""
