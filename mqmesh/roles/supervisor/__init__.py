"""The supervisor of a cluster's processes: starts, restarts, run file, log lines."""
