"""One program for a real RocketMQ and for mqmesh's gateway, and the comparison of their answers."""
