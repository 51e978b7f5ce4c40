"""Filter servers of the broker."""
