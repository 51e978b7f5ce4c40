"""Tables: topics of which the broker keeps the newest revisions of each key."""
