"""The transport's twin for simulations: one clock, one source of chance, one queue of events."""
