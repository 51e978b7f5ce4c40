"""The real transport: ZeroMQ sockets, the machine's clocks and threads. Only it imports zmq."""
