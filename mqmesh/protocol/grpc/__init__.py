"""RocketMQ 5's gRPC protocol: its messages, and calls on a connection of HTTP/2."""
