"""Clusters as their servers know them: brokers, topics and groups."""
