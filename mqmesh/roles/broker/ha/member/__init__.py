"""The parts of a replica's membership in its group."""
