"""Who may connect and who may do what: keys, the access list, and what follows from it."""
