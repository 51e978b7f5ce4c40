"""Messages: sent, shown, looked for, and those that wait or were given up."""
