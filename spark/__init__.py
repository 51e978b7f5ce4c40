"""The Spark archive of closed commitlog files, installed as `mqmesh.spark`."""
