"""Messages stored and handed out: of late, today and yesterday."""
