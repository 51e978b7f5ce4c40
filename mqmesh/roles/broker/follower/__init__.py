"""A follower: its copy of the log, what it serves, and what it does while its master is gone."""
