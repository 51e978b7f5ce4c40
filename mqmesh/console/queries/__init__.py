"""Queries behind the pages: from an arguments struct to a result struct, by the SDK."""
