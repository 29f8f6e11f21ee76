"""`tokenize`: tokenize a text dataset once into files of tokens, on all cores or a Ray cluster.

Names are imported at first use, so that workers do not import torch, which takes longer than many tasks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock import lazy

__all__ = ["TokenizeReport", "tokenize"]

if TYPE_CHECKING:
    from penstock.tokenizing.job import TokenizeReport, tokenize

__getattr__, __dir__ = lazy.names(__name__, {"TokenizeReport": "job", "tokenize": "job"})
