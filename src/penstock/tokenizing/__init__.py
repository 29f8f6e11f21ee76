"""`tokenize`: a whole data set of text into files of tokens, once, by all cores or a Ray cluster."""

from penstock.tokenizing.job import TokenizeReport, tokenize

__all__ = ["TokenizeReport", "tokenize"]
