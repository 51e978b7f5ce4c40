"""Reading and writing for engines that keep positions themselves, as Spark does."""
