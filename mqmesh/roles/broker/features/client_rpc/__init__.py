"""Questions of administrators to consumers."""
