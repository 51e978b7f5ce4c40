"""How messages come: pulls, and what holds them until somebody takes them."""
