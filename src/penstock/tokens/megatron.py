"""Read and write Megatron's ``.idx`` files, which index ``.bin`` files of tokens.

    bytes 0-8     b"MMIDIDX\\0\\0"
    8             version, 1
    1             code of the type of the tokens
    8             number of sequences, n
    8             number of document indices, d
    4 n           tokens of each sequence, int32
    8 n           offset of each sequence in the .bin file, in bytes, int64
    8 d           first sequence of each document, then n, int64
    n             mode of each sequence, int8; only in files for several modalities

All little-endian, without padding. Source: `megatron/core/datasets/indexed_dataset.py` of
Megatron-LM (Megatron-Core), whose writers give each document of a language model one sequence.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError, DataFileError

__all__ = ["CODES", "MegatronIndex", "is_index", "read_header", "write_index"]

_HEADER = struct.Struct("<9sQBQQ")
_MAGIC = b"MMIDIDX\x00\x00"
_ROWS = 1 << 20  # rows written at a time

CODES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
"""NumPy names of the token types, by code."""


class MegatronHeader(NamedTuple):
    """The header of an index."""

    dtype: str
    sequences: int
    documents: int


def is_index(path: str) -> bool:
    """Return whether a file begins like a Megatron index; False if it does not exist."""
    try:
        with open(path, "rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def read_header(path: str, data: npt.NDArray[np.uint8]) -> MegatronHeader:
    """Return the header of an index; DataFileError if it is another file, damaged or truncated."""
    if len(data) < _HEADER.size or bytes(data[:9]) != _MAGIC:
        raise DataFileError(f"{path} is no index of Megatron's: it does not begin with {_MAGIC!r}")
    _, version, code, sequences, ends = _HEADER.unpack(bytes(data[: _HEADER.size]))
    if version != 1:
        raise DataFileError(f"{path} is an index of version {version}, and only version 1 is known")
    dtype = CODES.get(code)
    if dtype is None or np.dtype(dtype).kind not in "iu":
        raise DataFileError(f"{path}: the type of its tokens has the code {code}, which is none of integers")
    need = _HEADER.size + 12 * sequences + 8 * ends
    if ends < 1 or len(data) not in (need, need + sequences):
        raise DataFileError(
            f"{path} has {len(data):,} bytes, and {need:,} belong to {sequences:,} sequences and {ends:,} document "
            "indices: it is truncated or damaged"
        )
    return MegatronHeader(dtype, sequences, ends - 1)


class MegatronIndex:
    """The position of each document in a ``.bin`` file of ``size`` bytes; ``read()`` returns the mapped index."""

    def __init__(self, path: str, read: Callable[[], npt.NDArray[np.uint8]], size: int) -> None:
        self._read = read
        self.header = header = read_header(path, read())
        self._width = np.dtype(header.dtype).itemsize
        sizes, pointers, documents = self._arrays()
        if documents[0] != 0 or documents[-1] != header.sequences:
            raise DataFileError(f"{path}: its documents do not begin with its first sequence or end with its last one")
        end = int(pointers[-1]) + int(sizes[-1]) * self._width if header.sequences else 0
        if end != size:
            raise DataFileError(
                f"{path}: its last sequence ends at byte {end:,}, and the file of tokens has {size:,} bytes: one of "
                "them is truncated, or of another pair"
            )

    def _arrays(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return sizes, pointers and document indices as mapped, unaligned arrays."""
        data, header = self._read(), self.header
        first = _HEADER.size + 4 * header.sequences
        second = first + 8 * header.sequences
        third = second + 8 * (header.documents + 1)
        return data[_HEADER.size : first].view("<i4"), data[first:second].view("<i8"), data[second:third].view("<i8")

    def __len__(self) -> int:
        return self.header.documents

    def bounds(self, rows: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return first and end token of documents. In a damaged index these may be any numbers."""
        sizes, pointers, documents = self._arrays()
        if not len(sizes):
            return np.zeros_like(rows), np.zeros_like(rows)
        # A damaged index may hold any numbers, which is not an IndexError of the caller.
        first, last = (np.clip(documents[rows + more], 0, len(sizes)) for more in (0, 1))
        inside, behind = np.minimum(first, len(sizes) - 1), np.maximum(last, 1) - 1
        begins = pointers[inside] // self._width
        ends = pointers[behind] // self._width + sizes[behind]
        return begins, np.where(first == last, begins, ends)

    def mapped_lengths(self) -> npt.NDArray[np.int32] | None:
        """Return the mapped lengths of the file; None if documents have several sequences."""
        sizes, _, documents = self._arrays()
        if self.header.documents != self.header.sequences:
            return None
        for begin in range(0, len(documents), _ROWS):
            part = documents[begin : begin + _ROWS]
            if not np.array_equal(part, np.arange(begin, begin + len(part))):
                return None
        return sizes


def write_index(out: BinaryIO, dtype: npt.DTypeLike, lengths: Sequence[int] | npt.NDArray[Any]) -> None:
    """Write the index of consecutive documents that have one sequence each."""
    kind = np.dtype(dtype).newbyteorder("<")
    code = next((code for code, name in CODES.items() if np.dtype(name) == kind), None)
    if code is None:
        raise ConfigError(f"Megatron's files have no tokens of {np.dtype(dtype)}: write uint16 or int32")
    sizes = np.asarray(lengths, "<i4")
    out.write(_HEADER.pack(_MAGIC, 1, code, len(sizes), len(sizes) + 1))
    out.write(sizes.tobytes())
    ends = np.cumsum(sizes, dtype="<i8") * kind.itemsize
    out.write((ends - sizes.astype("<i8") * kind.itemsize).tobytes())
    out.write(np.arange(len(sizes) + 1, dtype="<i8").tobytes())
