"""The exporter: metrics of all processes of a cluster for Prometheus, from one process."""
