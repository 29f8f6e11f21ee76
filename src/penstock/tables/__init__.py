"""Tables of samples: Arrow and Parquet files, JSON lines, and folders of `huggingface/datasets`.

    table = TableFiles("data/squad", split="train")         a sequence of samples, dicts of columns
    table = JsonFiles("part-*.jsonl.zst")                   the same for JSON lines, plain or compressed

A manifest is different: it lists files that hold the samples, even if the list is a Parquet file. See
`penstock.Manifest`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock import lazy

__all__ = ["JsonFiles", "TableFiles"]

if TYPE_CHECKING:
    from penstock.tables.json_files import JsonFiles
    from penstock.tables.table import TableFiles

__getattr__, __dir__ = lazy.names(__name__, {"json_files": ["JsonFiles"], "table": ["TableFiles"]})
