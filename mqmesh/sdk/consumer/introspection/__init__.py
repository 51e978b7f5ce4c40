"""What a consumer tells administrators of itself."""
