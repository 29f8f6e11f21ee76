"""`ArrayFiles`: the rows of memory-mapped ``.npy`` files; `LabelledArrays`: rows with labels."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from penstock.errors import ConfigError, DataFileError
from penstock.manifest.indices import by_part
from penstock.order.permutation import Indices, normalise
from penstock.sources.files_source import FilesSource
from penstock.stages import stage
from penstock.storage import Storage
from penstock.storage.mapped import MappedFiles, inspect_file
from penstock.storage.names import Urls, expand, without_query
from penstock.wording import counted

__all__ = ["ArrayFiles", "LabelledArrays"]

Empty = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]


class ArrayFiles(FilesSource):
    """The rows of concatenated ``.npy`` files with equal dtype and row shape."""

    def __init__(self, files: Urls, storage: Storage | None = None) -> None:
        names = expand(files, storage)
        for name in names:
            if not without_query(name).lower().endswith(".npy"):
                raise ConfigError(f"{name}: rows are read out of .npy files; files of others have load=LoadBytes()")
        found = [inspect_file(name, None, storage) for name in names]
        first = found[0]
        for file in found:
            if (file.dtype, file.shape[1:]) != (first.dtype, first.shape[1:]):
                raise DataFileError(
                    f"{file.path} has rows of {np.dtype(file.dtype)} {file.shape[1:]}, and {first.path} of "
                    f"{np.dtype(first.dtype)} {first.shape[1:]}: open them apart"
                )
        self.maps = MappedFiles(found)
        self.row = first.shape[1:]
        kind = np.dtype(first.dtype)
        try:
            self.type = torch.from_numpy(np.empty(0, kind.newbyteorder("="))).dtype
        except TypeError:
            raise DataFileError(f"{first.path} holds {kind}, of which there are no tensors") from None
        self.starts = np.cumsum([0, *(file.shape[0] for file in found)], dtype=np.int64)

    def __repr__(self) -> str:
        return f"<ArrayFiles of {counted(len(self), 'row')}: {self.maps.in_words()}>"

    def read_into(self, out: npt.NDArray[Any], rows: npt.NDArray[np.int64]) -> None:
        """Write rows into an array of shape (rows, *row), with one copy from the file's pages."""
        for number, places, local in by_part(self.starts, rows):
            array = self.maps.array(number)
            if len(places) == len(rows) and array.dtype == out.dtype:
                np.take(array, local, axis=0, out=out, mode="clip")  # in range: `normalise` has checked
            else:
                out[places] = array[local]

    def gather(self, rows: Indices, empty: Empty) -> list[torch.Tensor]:
        """Return rows as a list of one tensor (rows, *row), allocated by ``empty(shape, dtype)``."""
        found = empty((len(rows), *self.row), self.type)
        self.read_into(found.numpy(), rows)
        return [found]

    def records(self, rows: Indices) -> list[torch.Tensor]:
        """Return a tensor for each row."""
        with stage("read"):
            return list(self.gather(normalise(rows, len(self)), _ordinary)[0])


def _ordinary(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


class LabelledArrays(FilesSource):
    """Rows with labels as one table; its fingerprint includes both."""

    def __init__(self, arrays: ArrayFiles, labels: ArrayFiles) -> None:
        self._parts = arrays, labels
        self.maps, self.starts = arrays.maps, arrays.starts

    def __repr__(self) -> str:
        return f"{self._parts[0]!r} with labels"

    def gather(self, rows: Indices, empty: Empty) -> list[torch.Tensor]:
        """Return rows and labels as two tensors, allocated by ``empty(shape, dtype)``."""
        return [tensor for part in self._parts for tensor in part.gather(rows, empty)]

    def records(self, rows: Indices) -> list[tuple[torch.Tensor, ...]]:
        """Return a pair of tensors for each row."""
        with stage("read"):
            return list(zip(*self.gather(normalise(rows, len(self)), _ordinary), strict=True))

    @property
    def version(self) -> str:
        return _both(*(part.version for part in self._parts))

    def prefixes(self, rows: int) -> list[str]:
        return [_both(*pair) for pair in product(*(part.prefixes(rows) for part in self._parts))]


def _both(arrays: str, labels: str) -> str:
    return xxhash.xxh3_128_hexdigest(f"{arrays} with labels {labels}".encode())
