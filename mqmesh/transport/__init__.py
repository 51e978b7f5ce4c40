"""ZeroMQ lives here: sockets, the event loop, request server and client."""
