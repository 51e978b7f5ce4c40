"""Messages that are acknowledged one by one: receives, settlements, leases."""
