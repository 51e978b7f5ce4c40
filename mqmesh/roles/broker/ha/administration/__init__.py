"""What administrators ask of a replica group: who belongs to it, and that nobody is elected."""
