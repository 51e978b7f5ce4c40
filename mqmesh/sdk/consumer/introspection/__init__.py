"""Introspection: reports of a consumer for administrators."""
