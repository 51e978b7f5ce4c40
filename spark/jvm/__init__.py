"""Java for Spark, and what it loads."""
