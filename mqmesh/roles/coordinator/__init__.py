"""The embedded coordinator: sessions, and one record of each broker group, in one process."""
