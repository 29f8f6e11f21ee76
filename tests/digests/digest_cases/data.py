"""Small sources in every format, and data sets whose items say what was drawn for them."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from mds_writer import write_mds
from torch.utils.data import Dataset

import penstock as ps

__all__ = ["ROWS", "Draws", "Faulty", "GlobalDraws", "Sources", "draw"]

ROWS = 61
"""Samples of every source: odd, prime, and no multiple of a batch size or a world size."""


def draw() -> int:
    """Return one draw of the sample's own generator: raw, since NumPy may change its distributions."""
    return int(ps.generator().bit_generator.random_raw()) >> 1


class Draws(Dataset[Any]):
    """The index, and a draw of the sample's own generator."""

    pure = True

    def __init__(self, n: int = ROWS) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"index": index, "own": draw(), "again": draw()}


class GlobalDraws(Draws):
    """And draws of the global generators, which a loader with a seed seeds for each sample."""

    pure = False

    def __getitem__(self, index: int) -> dict[str, int]:
        drawn = {"python": random.getrandbits(40), "numpy": int(np.random.randint(1 << 30))}
        return {**super().__getitem__(index), **drawn, "torch": int(torch.randint(1 << 40, ()))}


class Faulty(Draws):
    """One item in seven cannot be loaded."""

    def __getitem__(self, index: int) -> dict[str, int]:
        if index % 7 == 3:
            raise ValueError(f"no {index}")
        return super().__getitem__(index)


class Sources:
    """The same rows as files of every format, each written when a case first asks for it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cached_property
    def text(self) -> str:
        path = self._folder / "train.txt"
        path.write_text("".join(f"folder/{row}.jpg {row % 5}\n" for row in range(ROWS)))
        return str(path)

    @cached_property
    def manifest(self) -> ps.Manifest:
        return ps.Manifest.open(self.text, progress=False)

    @cached_property
    def shards(self) -> list[str]:
        with ps.ShardWriter(str(self._folder / "shard-%02d.tar"), maxcount=9, mtime=1) as writer:
            for row in range(ROWS):
                writer.write({"__key__": f"{row:04d}", "cls": row % 5, "txt": f"text {row}"})
        return sorted(str(path) for path in self._folder.glob("shard-*.tar"))

    @cached_property
    def mds(self) -> Path:
        samples = [{"row": row, "text": f"text {row}"} for row in range(ROWS)]
        return write_mds(self._folder / "mds", {"row": "int", "text": "str"}, samples, per_shard=9)

    @cached_property
    def table(self) -> pa.Table:
        return pa.table({"row": range(ROWS), "text": [f"text {row}" for row in range(ROWS)]})

    @cached_property
    def arrow(self) -> str:
        path = str(self._folder / "rows.arrow")
        with pa.OSFile(path, "wb") as sink, pa.ipc.new_file(sink, self.table.schema) as writer:
            writer.write_table(self.table, max_chunksize=16)
        return path

    @cached_property
    def parquet(self) -> str:
        path = str(self._folder / "rows.parquet")
        pq.write_table(self.table, path, row_group_size=16)
        return path

    @cached_property
    def arrays(self) -> tuple[list[str], list[str]]:
        """Files of features and files of labels."""
        names: tuple[list[str], list[str]] = [], []
        for part, rows in enumerate(np.array_split(np.arange(ROWS), 3)):
            values = {"features": rows[:, None] * np.arange(4, dtype=np.float32), "labels": rows % 5}
            for kind, (name, value) in zip(names, values.items(), strict=True):
                kind.append(str(self._folder / f"{name}-{part}.npy"))
                np.save(kind[-1], value)
        return names

    @cached_property
    def tokens(self) -> list[str]:
        """Files of 16-bit tokens; 0 ends a document."""
        paths = []
        for part in range(3):
            tokens = np.arange(part * 1000, part * 1000 + 163, dtype="<u2")
            tokens[np.arange(7, 163, 11 + part)] = 0
            paths.append(str(self._folder / f"tokens-{part}.bin"))
            tokens.tofile(paths[-1])
        return paths

    def families(self) -> dict[str, Callable[..., Any]]:
        """Return each map-style data set of ours over these rows, as a function of its options."""
        features, labels = self.arrays
        return {
            "rank": lambda **options: ps.RankDataset(self.manifest, **options),
            "shards": lambda **options: ps.ShardDataset(self.shards, progress=False, **options),
            "mds": lambda **options: ps.MDSDataset(self.mds, **options),
            "arrow": lambda **options: ps.TableDataset(self.arrow, **options),
            "parquet": lambda **options: ps.TableDataset(self.parquet, **options),
            "arrays": lambda **options: ps.ArrayDataset(features, labels=labels, **options),
            "tokens": lambda **options: ps.TokenDataset(self.tokens, 8, dtype="<u2", **options),
            "documents": lambda **options: ps.TokenDataset(self.tokens, 8, dtype="<u2", end_token=0, **options),
        }
