"""Java for Spark, and the jars and classes that it loads."""
