"""Tokens of text: picklable tokenizers, and the file formats of tokenized documents."""
