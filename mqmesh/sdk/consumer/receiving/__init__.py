"""Messages that are received under leases, and settled one by one."""
