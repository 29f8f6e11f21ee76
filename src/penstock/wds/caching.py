"""Caches of samples that are read once: in memory, or in a file.

The first epoch passes samples through and fills the cache, which is used once that epoch has been read to its end.
"""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from penstock.wds.utils import PipelineStage, pytorch_worker_info

__all__ = ["Cached", "LMDBCached"]


class Cached(PipelineStage):
    """A cache in memory, in each persistent worker."""

    def __init__(self) -> None:
        self.cached: list[Any] | None = None

    def run(self, source: Any = None) -> Iterator[Any]:
        """Yield the samples of the source the first time, and the cached ones after that."""
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
    """A cache in an LMDB file (extra ``lmdb``). Samples are pickled, so the file must be trusted.

    Args:
        fname: path of the file. With several ranks or workers, each has a file of its own, with its rank, the number of
            ranks, its number and the number of workers after the name: ``kept.lmdb.0-1-1-2``.
        map_size: the largest size of the file, in bytes.
        pickler: an object or module with ``dumps`` and ``loads``.
        chunksize: samples per transaction.
    """

    def __init__(self, fname: str, map_size: float = 1e12, pickler: Any = pickle, chunksize: int = 500) -> None:
        self.fname, self.map_size, self.pickler, self.chunksize = fname, int(map_size), pickler, chunksize

    def run(self, source: Any = None) -> Iterator[Any]:
        """Yield the samples of the source the first time, and those in the file after that."""
        import lmdb

        rank, ranks, worker, workers = pytorch_worker_info()
        name = self.fname if ranks * workers == 1 else f"{self.fname}.{rank}-{ranks}-{worker}-{workers}"
        with lmdb.open(name, map_size=self.map_size, subdir=False) as base:
            with base.begin() as txn:
                whole = txn.get(b"_")
            if whole is not None:
                with base.begin() as txn:
                    for key, value in txn.cursor():
                        if key != b"_":
                            yield self.pickler.loads(bytes(value))
                return
            with base.begin(write=True) as txn:
                # An epoch that was left may have written more samples than this one has.
                txn.drop(base.open_db(), delete=False)
            chunk: list[tuple[bytes, bytes]] = []
            for number, sample in enumerate(source):
                yield sample
                chunk.append((b"%012d" % number, self.pickler.dumps(sample)))
                if len(chunk) >= self.chunksize:
                    self._write(base, chunk)
                    chunk = []
            self._write(base, [*chunk, (b"_", b"whole")])

    def __getstate__(self) -> dict[str, Any]:
        name = self.pickler.__name__ if isinstance(self.pickler, ModuleType) else None  # a module cannot be pickled
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
