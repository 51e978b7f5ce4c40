"""Consumer groups: members, claims, locks, offsets, resets."""
