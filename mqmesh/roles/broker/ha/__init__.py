"""Replicas of a broker group: who leads, who is in sync, what is confirmed."""
