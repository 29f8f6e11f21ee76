"""`FilesSource`: the rows of many files of one format, numbered across the files.

A subclass is a format: it opens the files, counts their rows, and reads rows by file and number. The rest is the same
for all of them, and is here: the file of a row, the identity of the rows, and the files in a store.
"""

from __future__ import annotations

import abc
import operator
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.order.permutation import Indices
from penstock.shards.shard_file import StoredShard
from penstock.storage.mapped import MappedFiles

__all__ = ["FilesSource"]


class FilesSource(abc.ABC):
    """Rows in a list of files that may grow by more files. See `penstock.plan.source.Source`."""

    maps: MappedFiles
    starts: npt.NDArray[np.int64]
    """The first row of each file, and the number of all rows."""

    @property
    def all_maps(self) -> list[MappedFiles]:
        """`maps`, and the further files that the rows depend on, such as indexes."""
        return [self.maps]

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, index: SupportsIndex) -> Any:
        """Return one record. Negative indices count from the end; IndexError outside."""
        return self.records(np.array([operator.index(index)]))[0]

    @abc.abstractmethod
    def records(self, rows: Indices) -> list[Any]:
        """Return the records of rows, in this order."""

    def stored(self) -> list[StoredShard]:
        """Return the files in a store that are copied when they are needed, for prefetching."""
        return [
            StoredShard(number, source, [])
            for number, source in sorted(self.maps.sources.items())
            if number not in self.maps.in_place
        ]

    # Identity.

    def prefixes(self, rows: int) -> list[str]:
        """Return the fingerprints of the first files with ``rows`` rows in total: several if some files are empty."""
        ends = np.flatnonzero(self.starts == rows).tolist()
        return [xxhash.xxh3_128_hexdigest(" ".join(self.identity(end)).encode()) for end in ends]

    def identity(self, files: int) -> list[str]:
        """Return all that the rows of the first files depend on: by default the fingerprints of the files."""
        return [maps.fingerprint(number) for maps in self.all_maps for number in range(files)]

    @property
    def fingerprint(self) -> str:
        """The identity of all rows. For states, which move to other machines."""
        return self.prefixes(len(self))[-1]

    @property
    def version(self) -> str:
        """The version of the files, see `MappedFiles.version`. Keys of cached results hold it besides the fingerprint,
        which does not cover every byte.
        """
        versions = [maps.version(number) for maps in self.all_maps for number in range(len(maps.files))]
        return xxhash.xxh3_128_hexdigest(" ".join(versions).encode())

    def is_prefix_of_current(self, fingerprint: str, rows: int) -> bool:
        """Return whether files with this fingerprint and number of rows have since grown into these."""
        return fingerprint in self.prefixes(rows)
