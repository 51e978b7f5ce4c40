"""Replicas of a broker group: who leads, who follows and is in sync, what is confirmed."""
