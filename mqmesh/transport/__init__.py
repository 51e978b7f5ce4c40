"""Transport: ZeroMQ sockets, the event loop, request server and client."""
