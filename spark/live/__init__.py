"""Topics of a running cluster, read and written by Spark."""
