"""Tokens of text: tokenizers as picklable handles, and the files that documents of tokens are kept in."""
