"""Files of rows in every format, chains of data sets over them, and what such a chain must deliver, by lists alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.feather
import pyarrow.parquet
import torch
from mds_writer import write_mds

import penstock as ps
from penstock.storage import Storage

PER_FILE = 9
WIDTH = 6
"""Characters of a row's text, in every version."""

LOADERS: dict[str, dict[str, Any]] = {
    "inline": {"num_workers": 0},
    "threads": {"num_workers": 2, "executor": "thread"},
    "fork": {"num_workers": 2, "multiprocessing_context": "fork"},
    "forkserver": {"num_workers": 2, "multiprocessing_context": "forkserver"},
    "spawn": {"num_workers": 1, "multiprocessing_context": "spawn"},
}


class Row(NamedTuple):
    """A row in one version of its file. All versions of a file have the same size."""

    number: int
    version: int

    @property
    def text(self) -> str:
        return f"{self.number:04d}v{self.version}"

    @property
    def score(self) -> int:
        return (self.number + self.version) % 3


def _table(rows: Sequence[Row]) -> pa.Table:
    return pa.table({"text": [row.text for row in rows], "score": [row.score for row in rows]})


def _text(path: Path, rows: Sequence[Row]) -> None:
    path.write_text("".join(f"{row.text} {row.score}\n" for row in rows))


def _csv(path: Path, rows: Sequence[Row]) -> None:
    path.write_text("path,label\n" + "".join(f"{row.text},{row.score}\n" for row in rows))


def _jsonl_manifest(path: Path, rows: Sequence[Row]) -> None:
    path.write_text("".join(f'{{"path": "{row.text}", "label": {row.score}}}\n' for row in rows))


def _jsonl(path: Path, rows: Sequence[Row]) -> None:
    path.write_text("".join(f'{{"text": "{row.text}", "score": {row.score}}}\n' for row in rows))


def _parquet(path: Path, rows: Sequence[Row]) -> None:
    pyarrow.parquet.write_table(_table(rows), path, use_dictionary=False, compression="none")


def _parquet_manifest(path: Path, rows: Sequence[Row]) -> None:
    table = _table(rows).rename_columns(["path", "label"])
    pyarrow.parquet.write_table(table, path, use_dictionary=False, compression="none")


def _arrow(path: Path, rows: Sequence[Row]) -> None:
    pyarrow.feather.write_feather(_table(rows), str(path), compression="uncompressed")


def _tar(path: Path, rows: Sequence[Row]) -> None:
    with ps.TarWriter(str(path), mtime=0) as writer:
        for row in rows:
            writer.write({"__key__": f"{row.number:04d}", "txt": row.text, "cls": row.score})


def _mds(path: Path, rows: Sequence[Row]) -> None:
    path.mkdir(exist_ok=True)
    samples = [{"text": row.text, "score": row.score} for row in rows]
    write_mds(path, {"text": "str", "score": "int"}, samples, per_shard=PER_FILE)


def text_of(item: Any) -> str:
    """Return the text of a row's item."""
    if isinstance(item, dict):
        found = item["text"] if "text" in item else item["txt"]
        return found.decode() if isinstance(found, bytes) else str(found)
    return str(item[0])


text_of.pure = True  # type: ignore[attr-defined]


def ids_of(text: str) -> list[int]:
    """A tokenizer."""
    return list(map(ord, text))


ids_of.fingerprint = "characters"  # type: ignore[attr-defined]


def text_of_ids(ids: Any) -> str:
    """Return the text of a document."""
    return "".join(map(chr, np.asarray(ids).tolist()))


@dataclass(frozen=True)
class Format:
    """How rows are written and opened.

    Args:
        name: the pattern of the names of its files.
        write: writes a file of rows.
        open: opens files.
        by: how a filter names the rows: the column of an expression; None, by an array of rows.
        texts: whether items are dicts with a text.
        counted: opens files whose rows a store does not tell, and counts them.
    """

    name: str
    write: Callable[[Path, Sequence[Row]], None]
    open: Callable[..., Any]
    by: str | None = None
    texts: bool = False
    counted: Callable[..., Any] | None = None


def _rank(files: Any, storage: Storage | None, **options: Any) -> Any:
    return ps.RankDataset(ps.Manifest.open(files, storage=storage), **options)


FORMATS = {
    "text": Format("rows-{}.txt", _text, _rank),
    "csv": Format("rows-{}.csv", _csv, _rank, "label"),
    "JSON lines manifest": Format("rows-{}.jsonl", _jsonl_manifest, _rank),
    "Parquet manifest": Format("rows-{}.parquet", _parquet_manifest, _rank, "label"),
    "JSON lines": Format("rows-{}.jsonl", _jsonl, ps.TableDataset, texts=True, counted=ps.JsonFiles),
    "Parquet": Format("rows-{}.parquet", _parquet, ps.TableDataset, "score", texts=True),
    "Arrow": Format("rows-{}.arrow", _arrow, ps.TableDataset, "score", texts=True),
    "tar": Format("rows-{}.tar", _tar, ps.ShardDataset, counted=ps.ShardSet),
    "tar by ranges": Format(
        "rows-{}.tar", _tar, lambda files, **options: ps.ShardDataset(files, copy=False, **options)
    ),
    "MDS": Format("rows-{}", _mds, lambda files, **options: ps.MDSDataset(files[0], **options), texts=True),
}


@dataclass(frozen=True)
class Chain:
    """Data sets over files of one format.

    Args:
        kind: the name of the format.
        steps: "filter", "mixture", "tokens", "job" (tokens that `penstock.tokenize` wrote) and "packs", in this order.
        loader: the name of the loader's options.
    """

    kind: str
    steps: tuple[str, ...]
    loader: str = "inline"

    def rows(self, rows: Sequence[Row], other: Sequence[Row]) -> list[str]:
        """Return the texts of an epoch, sorted."""
        if "mixture" in self.steps:
            rows = [*rows, *other]
        return sorted(row.text for row in rows if "filter" not in self.steps or row.score)

    def make(
        self, files: Any, other: Any, rows: Sequence[Row], others: Sequence[Row], storage: Storage | None, out: Path
    ) -> Any:
        """Return the data set of one rank of one. Its items are rows, documents or packs."""
        alone: dict[str, Any] = {"rank": 0, "world_size": 1}
        found = self._open(files, storage, **alone)
        if "filter" in self.steps:
            found = self._filtered(found, rows)
        if "mixture" in self.steps:
            second = self._open(other, storage, **alone)
            second = self._filtered(second, others) if "filter" in self.steps else second
            found = ps.Mixture([(found, 1), (second, 1)], mode="repeat", **alone)
        if "job" in self.steps:
            ps.tokenize(found, out, ids_of, column="text", dtype="uint16", workers=1, progress=False)
            found = ps.DocumentDataset(out, **alone)
        elif "tokens" in self.steps:
            found = ps.TokenizedDataset(found, ids_of, column="text")
        if "packs" in self.steps:
            lengths = (
                None
                if "job" in self.steps
                else np.full(len(found.source) if hasattr(found, "source") else len(found), WIDTH)
            )
            found = ps.PackedDataset(found, 4 * WIDTH, lengths=lengths, **alone)
        return found

    def _open(self, files: Any, storage: Storage | None, **alone: Any) -> Any:
        made = FORMATS[self.kind]
        if made.counted is not None and {*self.steps} - {"tokens"}:
            return made.open(made.counted(files, storage=storage), **alone)
        return made.open(files, storage=storage, **alone)

    def _filtered(self, dataset: Any, rows: Sequence[Row]) -> Any:
        by = FORMATS[self.kind].by
        return ps.Subset(dataset, np.array([row.score > 0 for row in rows]) if by is None else pc.field(by) > 0)

    def texts(self, dataset: Any) -> list[str]:
        """Return the texts of an epoch."""
        with ps.DataLoader(dataset, batch_size=4, collate_fn=list, **LOADERS[self.loader]) as loader:
            items = [item for batch in loader for item in batch]
        if "packs" in self.steps:
            return [text for item in items for text in _in_pack(item)]
        if "job" in self.steps or "tokens" in self.steps:
            return [text_of_ids(item) for item in items]
        return [text_of(item) for item in items]


def _in_pack(item: dict[str, torch.Tensor]) -> list[str]:
    ids = item["input_ids"].tolist()
    return [text_of_ids(ids[begin : begin + WIDTH]) for begin in range(0, len(ids), WIDTH) if ids[begin]]


def write(folder: Path, kind: str, rows: Sequence[Row], *, in_place: bool = True) -> list[Path]:
    """Write rows as files of one format, over what is there or in its place."""
    folder.mkdir(exist_ok=True)
    made = FORMATS[kind]
    files = []
    step = len(rows) if kind == "MDS" else PER_FILE
    for begin in range(0, len(rows), step):
        file = folder / made.name.format(f"{begin:03d}")
        files.append(file)
        if in_place or kind == "MDS":
            made.write(file, rows[begin : begin + step])
        else:
            new = file.with_name(f"new-{file.name}")
            made.write(new, rows[begin : begin + step])
            os.replace(new, file)
    if kind == "tar by ranges":
        ps.ShardSet([str(file) for file in files])  # writes the indexes beside the files
    return files
