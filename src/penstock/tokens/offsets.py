"""`OffsetIndex`: document positions in one array: the first token of each, then the total number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import DataFileError

__all__ = ["OffsetIndex", "document_ends"]

_SCAN = 1 << 22  # number of tokens searched at a time for document ends


class OffsetIndex:
    """The position of each document in a token file.

    Args:
        path: path of the index, for messages.
        read: returns the mapped offsets, int64 of shape (documents + 1,).
        tokens: the number of tokens in the file.

    Raises:
        DataFileError: the offsets belong to another file, or are damaged.
    """

    def __init__(self, path: str, read: Callable[[], npt.NDArray[np.int64]], tokens: int) -> None:
        self._read = read
        offsets = read()
        if offsets.ndim != 1 or offsets.dtype != np.int64 or not len(offsets) or offsets[0] != 0:
            raise DataFileError(f"{path} is no index of documents: it holds {offsets.dtype} of shape {offsets.shape}")
        if offsets[-1] != tokens:
            raise DataFileError(
                f"{path}: its last document ends at token {offsets[-1]:,}, and the file has {tokens:,} tokens: one of "
                "them is truncated, or of another pair"
            )

    def __len__(self) -> int:
        return len(self._read()) - 1

    def bounds(self, rows: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return first and end token of documents."""
        offsets = self._read()
        return offsets[rows], offsets[rows + 1]

    def mapped_lengths(self) -> None:
        """Return None: the file holds offsets, not lengths."""


def document_ends(
    read: Callable[[int, int], npt.NDArray[Any]], total: int, end_token: int
) -> Iterator[npt.NDArray[np.int64]]:
    """Yield the end of each document (the position after its last token), in ascending, non-empty arrays.

    Args:
        read: ``read(begin, end)`` returns these tokens.
        total: number of tokens. Tokens after the last end token form a document, too.
        end_token: the last token of each document.
    """
    for begin in range(0, total, _SCAN):
        ends = np.flatnonzero(read(begin, begin + _SCAN) == end_token) + begin + 1
        if begin + _SCAN >= total and (not len(ends) or ends[-1] < total):
            ends = np.append(ends, total)
        if len(ends):
            yield ends
