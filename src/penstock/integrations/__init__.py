"""Replacements for classes of other libraries. Each module imports the library that it serves."""
