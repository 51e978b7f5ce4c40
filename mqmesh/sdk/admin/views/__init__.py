"""Shapes of answers for administrators: JSON of the command line, pages and JSON of the console.

They are made of the SDK's answers by functions without any I/O. msgspec encodes them as they are:
the names of the fields are the names in JSON.
"""
