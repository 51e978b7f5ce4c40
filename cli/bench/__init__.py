"""`mqmesh bench`: how fast a running cluster is, measured by clients in processes of their own."""
