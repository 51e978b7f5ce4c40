"""State of groups that acknowledge each message: what members hold, and what comes again. Pure."""
