"""Snapshots as a source of Spark, and the archive; installed as `mqmesh.spark`."""
