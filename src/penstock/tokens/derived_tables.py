"""Tables derived from token files: computed in one pass, cached in the user's cache folder, and mapped."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.storage import kept_array, kept_path
from penstock.storage.mapped import MappedFile

__all__ = ["document_ends", "kept_table", "said_of"]

_SCAN = 1 << 22  # number of tokens searched at a time for document ends


def kept_table(key: str, dtype: npt.DTypeLike, write: Callable[[BinaryIO], object], what: str) -> npt.NDArray[Any]:
    """Return the array that ``write(file)`` writes, see `penstock.storage.kept_array`.

    The key is text with everything that the numbers depend on, including the identity of the files.
    """
    path = kept_path("tokens", f"{xxhash.xxh3_128_hexdigest(os.fsencode(key))}.idx")
    return kept_array(path, dtype, write, what)


def said_of(file: MappedFile) -> str:
    """Return a cheap identity of a file: path, size, modification time, layout and inode."""
    return f"{os.path.realpath(file.path)} {tuple(file)[1:]}"


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
