"""Tables derived from token files: computed in one pass, cached in the user's cache folder, and mapped."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.storage import UNWRITABLE, file_lock, kept_path, write_kept
from penstock.storage.mapped import MappedFile

__all__ = ["document_ends", "kept_array", "said_of"]

_SCAN = 1 << 22  # number of tokens searched at a time for document ends


def kept_array(key: str, dtype: npt.DTypeLike, write: Callable[[BinaryIO], None], what: str) -> npt.NDArray[Any]:
    """Return the one-dimensional, read-only array that ``write(file)`` writes.

    One process of the machine writes the file while others wait; then all map it. If the cache has no room, each
    process holds the array in memory, with a warning.

    Args:
        key: text with everything that the numbers depend on, including the identity of the files.
        dtype: the dtype of the numbers.
        write: writes their raw bytes.
        what: name of the numbers, for the warning.
    """
    path = kept_path("tokens", f"{xxhash.xxh3_128_hexdigest(os.fsencode(key))}.idx")
    try:
        return _mapped(path, dtype, write)
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        warnings.warn(
            f"{path}: {what} cannot be stored there ({error.strerror}): each process holds its own copy in memory. "
            "Free space, or set XDG_CACHE_HOME to another folder",
            stacklevel=2,
        )
        made = io.BytesIO()
        write(made)
        return np.frombuffer(made.getvalue(), dtype)


def _mapped(path: Path, dtype: npt.DTypeLike, write: Callable[[BinaryIO], None]) -> npt.NDArray[Any]:
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        with file_lock(path):
            if not path.exists():
                with write_kept(path) as out:
                    write(out)
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)


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
