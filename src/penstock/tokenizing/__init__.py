"""`tokenize`: tokenize a text dataset once into files of tokens, on all cores or a Ray cluster.

Names are imported at first use: a worker needs only one of the modules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock import lazy

__all__ = ["TokenizeReport", "tokenize"]

if TYPE_CHECKING:
    from penstock.tokenizing.job import TokenizeReport, tokenize

__getattr__, __dir__ = lazy.names(__name__, {"job": ["TokenizeReport", "tokenize"]})
