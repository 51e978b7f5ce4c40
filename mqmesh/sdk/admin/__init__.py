"""What administrators ask and do."""
