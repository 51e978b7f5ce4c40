"""The filter server: runs filters in Python beside a broker, and passes on what matches."""
