"""State of groups that several features use: members, owners, locks, offsets, settings. Pure."""
