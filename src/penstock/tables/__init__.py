"""Tables that hold the samples themselves: Arrow and Parquet files, and the folders of `huggingface/datasets`.

    table = TableFiles("data/squad", split="train")         a sequence of samples, dicts of columns
    dataset = TableDataset("data/squad", split="train")     this rank's share of it, in an order of its own

A manifest names files that hold samples; that is another thing, also where it is kept as Parquet: `penstock.Manifest`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock import lazy

__all__ = ["TableDataset", "TableFiles"]

if TYPE_CHECKING:
    from penstock.tables.dataset import TableDataset
    from penstock.tables.table import TableFiles

__getattr__, __dir__ = lazy.names(__name__, {"TableDataset": "dataset", "TableFiles": "table"})
