"""`tokenize`: a whole data set of text into files of tokens, once, by all cores or a Ray cluster.

The names are imported when they are first used: workers need no torch, whose import takes longer than many a task.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock import lazy

__all__ = ["TokenizeReport", "tokenize"]

if TYPE_CHECKING:
    from penstock.tokenizing.job import TokenizeReport, tokenize

__getattr__, __dir__ = lazy.names(__name__, {"TokenizeReport": "job", "tokenize": "job"})
