"""Administration of a replica group: its members, its settings, and paused elections."""
