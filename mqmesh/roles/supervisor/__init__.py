"""What starts the roles of a cluster and looks after them: restarts, run file, log lines."""
