"""Foreign code, confined: the worker process that runs one filter of one consumer group."""
