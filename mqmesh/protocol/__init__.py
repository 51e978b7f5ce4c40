"""What is said on the wire: codes, commands and their bytes. No sockets."""
