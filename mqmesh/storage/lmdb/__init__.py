"""The store in LMDB, and the environments that the index uses as well."""
