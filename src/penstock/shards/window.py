"""A window of a tar archive: parse many headers at once, in NumPy.

A window finds the blocks with the magic of a header, their sizes and checksums, and which of them form a chain, so that
a tar archive inside a member is not mistaken for members. If headers are close together, the whole chunk is read
(`whole_window`), and stays in memory for readers of the data. If they are far apart, only the headers are read, one
after the other (`sparse_window`).

It accepts usual headers only: files and folders with short names, and PAX headers that set nothing but the time, as
WebDataset writes them. All others are left to `penstock.shards.tar.member_at`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from penstock.shards.archive import Archive, Source
from penstock.shards.header import BLOCK
from penstock.shards.members import DIR, FILE, Bytes, Ints, Members

__all__ = ["STRETCH", "Window", "sparse_window", "whole_window"]

STRETCH = 16 << 20
"""Bytes that a sparse window advances: a disk reads them ahead meanwhile."""

_FEW = 48  # with fewer headers in a window, parsing one by one is faster
_RUN = 8  # with fewer usual headers between unusual ones, on average, parsing one by one is faster
_MOST = 640  # maximum headers of a sparse window
_TINY = 256  # members of up to this many bytes are stored when a sparse window reads their header
_HEAD = 2048  # bytes that it reads at once: a small member, and the next header
_MAGIC = int.from_bytes(b"usta", "little")
_REGULAR, _FOLDER, _PAX = b"05x"
_OCTAL = 8.0 ** np.arange(10, -1, -1)
_CHECKSUM = np.array([[*_OCTAL[-6:], 0, 0], [1] * 8]).T  # to the stated checksum, and the sum of the field's bytes
_OFFSET = 48 * _OCTAL[-6:].sum()
_DIGITS, _ZEROS = 0xF8F8F8F8, 0x30303030  # "0" to "7" are 48 to 55
_USTAR, _GNU = (int.from_bytes(rest, "little") for rest in (b"r\x0000", b"r  \0"))
_NAME = 100
_fields = struct.Struct("124x11s21xB100x4s").unpack_from  # size, kind and magic of a header
_MTIME = np.frombuffer(b" mtime=", np.uint8)


class Window:
    """The parsed headers of a section of the archive.

    Args:
        start, stop: the bytes of the archive that were searched.
        number: numbers of the blocks that look like headers, counted from ``start``, ascending.
        raw: their bytes, of shape (headers, 512).
        following: returns the first bytes of the blocks after some headers, given their rows.

    ``is_useful`` tells whether it is faster than parsing one by one; `run` requires it.
    """

    def __init__(self, start: int, stop: int, number: Ints, raw: Bytes, following: Callable[[Ints], Bytes]) -> None:
        self.start, self.stop, self.number, self.raw = start, stop, number, raw
        self.is_useful = len(number) >= _FEW
        if not self.is_useful:
            return
        self._read(raw, following)
        linked = np.zeros(len(number), bool)
        linked[:-1] = self.next[:-1] == number[1:]
        self._stops = np.flatnonzero(~(linked & self.usual))
        self.is_useful = len(number) >= _RUN * len(self._stops)

    def _read(self, raw: Bytes, following: Callable[[Ints], Bytes]) -> None:
        kind = raw[:, 156]
        self.size: Ints = ((raw[:, 124:135].astype(np.float64) - 48) @ _OCTAL).astype(np.int64)
        high, middle, low = (_words(raw, at) for at in (124, 128, 132))
        usual = ((high & _DIGITS) == _ZEROS) & ((middle & _DIGITS) == _ZEROS) & ((low & 0xDFF8F8F8) == 0x00303030)
        usual &= _checksums_hold(raw) & (raw[:, 0] != 0) & (raw[:, _NAME - 1] == 0)
        # ustar with an empty prefix, or GNU, which uses these bytes otherwise
        rest = _words(raw, 261)
        usual &= ((rest == _USTAR) & (raw[:, 345] == 0)) | (rest == _GNU)
        is_dir, self.is_pax, self.is_file = kind == _FOLDER, kind == _PAX, kind == _REGULAR
        self.next: Ints = self.number + 1 + np.where(is_dir, 0, (self.size + (BLOCK - 1)) // BLOCK)
        if self.is_pax.any():
            usual &= ~self.is_pax | self._sets_time_only(usual, following)
        self.usual = usual & (self.is_file | is_dir | self.is_pax)

    def _sets_time_only(
        self, usual: npt.NDArray[np.bool_], following: Callable[[Ints], Bytes]
    ) -> npt.NDArray[np.bool_]:
        """Return which PAX headers set only the time, and precede a usual member in this window."""
        result = np.zeros(len(self.number), bool)
        rows = np.flatnonzero(self.is_pax & usual)
        rows = rows[rows + 1 < len(self.number)]
        rows = rows[self.number[rows + 1] == self.next[rows]]
        data, size = following(rows), self.size[rows]
        tens, ones = data[:, 0] - np.uint8(48), data[:, 1] - np.uint8(48)
        good = (tens < 10) & (ones < 10) & (tens.astype(np.int64) * 10 + ones == size) & (size > 9)
        good &= (data[:, 2:9] == _MTIME).all(1)
        good &= data[np.arange(len(rows)), np.clip(size - 1, 0, _NAME - 1)] == 10
        behind = rows + 1
        good &= usual[behind] & ~self.is_pax[behind] & (self.is_file | (self.raw[:, 156] == _FOLDER))[behind]
        result[rows[good]] = True
        return result

    def run(self, position: int) -> tuple[int, int]:
        """Return the range of rows of a chain of usual headers from a byte on; empty if there is none."""
        block = (position - self.start) // BLOCK
        row = int(np.searchsorted(self.number, block))
        if row == len(self.number) or self.number[row] != block:
            return 0, 0
        stop = int(self._stops[np.searchsorted(self._stops, row)])
        return row, stop + bool(self.usual[stop])

    def members(self, first: int, stop: int) -> Members:
        """Return the members among these rows."""
        rows = first + np.flatnonzero(~self.is_pax[first:stop])
        names = self.raw[rows, :_NAME]
        used = np.flatnonzero(names.any(0))
        names = names[:, : int(used[-1]) + 2 if len(used) else 1]  # keeps at least one column of zeros
        ends = names == 0
        lengths = ends.argmax(1)
        if int(lengths.sum()) + int(ends.sum()) != names.size:  # non-zero bytes after a zero
            names = np.where(np.arange(names.shape[1]) < lengths[:, None], names, 0).astype(np.uint8)
        before = np.maximum(rows - 1, 0)
        extended = (rows > first) & self.is_pax[before]
        kind = np.where(self.is_file[rows], FILE, DIR).astype(np.uint8)
        header = self.start + np.where(extended, self.number[before], self.number[rows]) * BLOCK
        offset = self.start + (self.number[rows] + 1) * BLOCK
        size = np.where(self.is_file[rows], self.size[rows], 0)
        return Members(names, lengths, kind, header, offset, size, self.start + self.next[rows] * BLOCK)

    def end(self, row: int) -> tuple[int, int]:
        """Return the end of a row's data, and the position of the next header."""
        data = self.start + (int(self.number[row]) + 1) * BLOCK
        following = self.start + int(self.next[row]) * BLOCK
        return data + (int(self.size[row]) if following > data else 0), following


def whole_window(source: Source, start: int, blocks: int) -> Window:
    """Return a window of all blocks of a section with the magic of a header; the source then holds the section."""
    data = np.frombuffer(source.hold(start, start + blocks * BLOCK), np.uint8)
    count = len(data) // BLOCK
    rows = data[: count * BLOCK].reshape(count, BLOCK)
    magic = np.ndarray((count,), "<u4", data, 257, (BLOCK,)) if count else np.zeros(0, np.uint32)
    number = np.flatnonzero(magic == _MAGIC)
    stop = start + count * BLOCK
    return Window(start, stop, number, rows[number], lambda which: rows[:, :_NAME][number[which] + 1])


def sparse_window(archive: Archive, start: int) -> Window:
    """Return a window of the headers of a section, read one by one: each determines the next position."""
    archive.fetch_ahead(start, start + 2 * STRETCH)
    position, limit = start, min(start + STRETCH, len(archive))
    numbers: list[int] = []
    found: list[bytes] = []
    records: dict[int, bytes] = {}  # the first bytes of PAX headers' data, by row
    small: dict[int, bytes] = {}
    data, begin, last = (
        b"",
        0,
        -1,
    )  # the last bytes read, where they begin, and the last possible position of a header in them
    while position < limit and len(found) < _MOST:
        at = position - begin
        if not 0 <= at <= last:
            # PAX headers double the headers between two large members.
            head = 2 * _HEAD if records else _HEAD
            data, begin, at = archive.read(position, position + head), position, 0
            last = len(data) - BLOCK - _NAME
        try:
            digits, kind, magic = _fields(data, at)
            length = int(digits, 8)
        except (ValueError, struct.error):
            break
        if length < 0 or magic != b"usta" or kind not in b"0x":
            break
        if kind == _PAX:
            records[len(found)] = data[at + BLOCK : at + BLOCK + _NAME]
        numbers.append(position)
        found.append(data[at : at + BLOCK])
        position, at = position + BLOCK, at + BLOCK
        if length <= _TINY and at + length <= len(data):
            small[position] = data[at : at + length]
        position += -(-length // BLOCK) * BLOCK
    if found:
        found[-1] = found[-1].ljust(BLOCK, b"\0")
    archive.keep(small)
    raw = np.frombuffer(b"".join(found), np.uint8).reshape(-1, BLOCK)
    number = (np.array(numbers, np.int64) - start) // BLOCK

    def following(rows: Ints) -> Bytes:
        firsts = b"".join(records[row].ljust(_NAME, b"\0") for row in rows.tolist())
        return np.frombuffer(firsts, np.uint8).reshape(-1, _NAME)

    return Window(start, position, number, raw, following)


def _words(raw: Bytes, at: int) -> npt.NDArray[np.uint32]:
    """Return four bytes of each header as a number."""
    return np.ndarray((len(raw),), "<u4", raw, at, (BLOCK,)) if len(raw) else np.zeros(0, np.uint32)


def _checksums_hold(raw: Bytes) -> npt.NDArray[np.bool_]:
    """Return whether the headers' checksums, in the usual format (six digits, NUL or space), are right."""
    stored, own = (raw[:, 148:156].astype(np.float64) @ _CHECKSUM).T
    digits = (_words(raw, 148) & _DIGITS) == _ZEROS
    digits &= (_words(raw, 152) & 0x00DFF8F8) == 0x00003030
    # In 32 bits, NumPy adds several times faster than in 64.
    return np.asarray(digits & (raw.sum(1, dtype=np.uint32) - own + 256 == stored - _OFFSET))
