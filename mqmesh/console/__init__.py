"""The web console: pages and a JSON API for people who look after a cluster."""
