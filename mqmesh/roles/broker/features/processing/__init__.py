"""Messages that are stored together with the progress of the group that they were made by."""
