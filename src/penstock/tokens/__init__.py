"""Tokens of text: tokenizers as picklable handles, and the file formats of tokenized documents."""
