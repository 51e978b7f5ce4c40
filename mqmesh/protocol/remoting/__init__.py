"""RocketMQ's remoting protocol: frames, codes, bodies and message records; no sockets."""
