"""Tables that hold the samples themselves: Arrow and Parquet files, JSON lines, the folders of `huggingface/datasets`.

    table = TableFiles("data/squad", split="train")         a sequence of samples, dicts of columns
    table = JsonFiles("part-*.jsonl.zst")                   the same of JSON lines, plain or compressed

A manifest names files that hold samples; that is another thing, also where it is kept as Parquet: `penstock.Manifest`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock import lazy

__all__ = ["JsonFiles", "TableFiles"]

if TYPE_CHECKING:
    from penstock.tables.json_files import JsonFiles
    from penstock.tables.table import TableFiles

__getattr__, __dir__ = lazy.names(__name__, {"JsonFiles": "json_files", "TableFiles": "table"})
