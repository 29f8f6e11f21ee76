"""`penstock.tokenize` on a real Ray cluster: the same bytes, and errors that are ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from text_support import END, TEXTS, digests, tokenizer, write_table

import penstock as ps
from penstock.errors import DataFileError


def test_a_cluster_writes_the_same_bytes(cluster: Any, tmp_path: Path) -> None:
    source = ps.open(write_table(tmp_path / "text.parquet", TEXTS))
    options: dict[str, Any] = {"append_eos": END, "shard_tokens": 300, "progress": False}
    ps.tokenize(source, tmp_path / "here", tokenizer(), workers=1, **options)
    report = ps.tokenize(source, tmp_path / "there", tokenizer(), executor="ray", **options)
    assert report.documents == len(TEXTS)
    assert digests(tmp_path / "there") == digests(tmp_path / "here")


def test_an_error_on_a_cluster_is_ours(cluster: Any, tmp_path: Path) -> None:
    source = ps.open(write_table(tmp_path / "text.parquet", TEXTS))
    with pytest.raises(DataFileError, match="row 0 has the token"):
        ps.tokenize(source, tmp_path / "out", tokenizer(), executor="ray", dtype="uint8", progress=False)
