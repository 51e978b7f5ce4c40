"""The command line, installed as `mqmesh.cli`."""
