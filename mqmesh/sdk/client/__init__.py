"""What every client has: routes, connections, heartbeats, options, its life."""
