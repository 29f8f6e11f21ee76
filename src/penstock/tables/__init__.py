"""Tables that hold the samples themselves: Arrow and Parquet files, and the folders of `huggingface/datasets`.

    table = TableFiles("data/squad", split="train")         a sequence of samples, dicts of columns

A manifest names files that hold samples; that is another thing, also where it is kept as Parquet: `penstock.Manifest`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock import lazy

__all__ = ["TableFiles"]

if TYPE_CHECKING:
    from penstock.tables.table import TableFiles

__getattr__, __dir__ = lazy.names(__name__, {"TableFiles": "table"})
