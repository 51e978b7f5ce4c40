"""Core of every client: routes, connections, heartbeats, options, start and close."""
