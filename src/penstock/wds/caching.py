"""Samples that are read once and kept: in memory, or in a file.

Within the first epoch they pass through; the cache counts once that epoch was read to its end.
"""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from penstock.wds.utils import PipelineStage

__all__ = ["Cached", "LMDBCached"]


class Cached(PipelineStage):
    """Samples in memory, in each worker that is kept."""

    def __init__(self) -> None:
        self.cached: list[Any] | None = None

    def run(self, source: Any = None) -> Iterator[Any]:
        """The samples of the source, the first time; after that those of the first time."""
        if self.cached is not None:
            yield from self.cached
            return
        kept = []
        for sample in source:
            yield sample
            kept.append(sample)
        self.cached = kept

    def __getstate__(self) -> dict[str, Any]:
        return {"cached": None}


class LMDBCached(PipelineStage):
    """Samples in an LMDB file (extra ``lmdb``). Trusted: they are pickled.

    Args:
        fname: the file; one for each worker and rank.
        map_size: bytes that it may have.
        pickler: what has ``dumps`` and ``loads``.
        chunksize: samples in a transaction.
    """

    def __init__(self, fname: str, map_size: float = 1e12, pickler: Any = pickle, chunksize: int = 500) -> None:
        self.fname, self.map_size, self.pickler, self.chunksize = fname, int(map_size), pickler, chunksize

    def run(self, source: Any = None) -> Iterator[Any]:
        """The samples of the source, the first time; after that those in the file."""
        import lmdb

        with lmdb.open(self.fname, map_size=self.map_size, subdir=False) as base:
            with base.begin() as txn:
                whole = txn.get(b"_")
            if whole is not None:
                with base.begin() as txn:
                    for key, value in txn.cursor():
                        if key != b"_":
                            yield self.pickler.loads(bytes(value))
                return
            chunk: list[tuple[bytes, bytes]] = []
            for number, sample in enumerate(source):
                yield sample
                chunk.append((b"%012d" % number, self.pickler.dumps(sample)))
                if len(chunk) >= self.chunksize:
                    self._write(base, chunk)
                    chunk = []
            self._write(base, [*chunk, (b"_", b"whole")])

    def __getstate__(self) -> dict[str, Any]:
        name = self.pickler.__name__ if isinstance(self.pickler, ModuleType) else None  # which cannot be pickled
        return self.__dict__ if name is None else {**self.__dict__, "pickler": name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if isinstance(self.pickler, str):
            self.pickler = importlib.import_module(self.pickler)

    @staticmethod
    def _write(base: Any, chunk: list[tuple[bytes, bytes]]) -> None:
        with base.begin(write=True) as txn:
            for key, value in chunk:
                txn.put(key, value)
