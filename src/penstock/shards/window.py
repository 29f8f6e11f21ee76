"""Many members of a tar archive at a time, as arrays: `scan`.

A window holds a chunk of the archive in memory. In NumPy, it finds the blocks with the magic of a header, their sizes
and checksums, and which of them form a chain, so that a tar archive inside a member is not mistaken for members. It
accepts usual headers only: files and folders with short names, and PAX headers that set nothing but the time, as
WebDataset writes them. All others, and those of large members, are parsed by `penstock.shards.tar.member_at`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.shards.archive import BLOCK, Archive
from penstock.shards.tar import Kind, Member, decode_name, member_at
from penstock.storage.urls import shown

__all__ = ["Bytes", "Ints", "Members", "scan", "texts"]

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

_KINDS: tuple[Kind, ...] = ("file", "dir", "link", "special")
_FILE, _DIR = 0, 1

_FIRST, _MOST = 256, 8192  # blocks of the first window, and of the largest
_ENOUGH = 1024  # members in a window
_NEAR = 8 << 10  # mean distance of members in bytes; if they are further apart, only headers are read
_STRETCH = 32 << 20  # bytes that are then advanced at a time: a disk reads them ahead meanwhile

_MAGIC = int.from_bytes(b"usta", "little")
_REGULAR, _FOLDER, _PAX = b"05x"
_OCTAL = 8.0 ** np.arange(10, -1, -1)
_CHECKSUM = np.array([[*_OCTAL[-6:], 0, 0], [1] * 8]).T  # to the stated checksum, and the sum of the field's bytes
_OFFSET = 48 * _OCTAL[-6:].sum()
_DIGITS, _ZEROS = 0xF8F8F8F8, 0x30303030  # "0" to "7" are 48 to 55
_USTAR, _GNU = (int.from_bytes(rest, "little") for rest in (b"r\x0000", b"r  \0"))
_NAME = 100
_HEAD = 2048  # bytes that a sparse window reads at once: a small member, and the next header
_fields = struct.Struct("124x11s21xB100x4s").unpack_from  # size, kind and magic of a header
_MTIME = np.frombuffer(b" mtime=", np.uint8)


class Members(NamedTuple):
    """Members of an archive in order, as arrays.

    ``names`` has a zero-padded row of bytes for each name; ``lengths`` are the lengths of the names; ``kind`` is 0 for
    regular files. The other fields are as in `Member`.
    """

    names: Bytes
    lengths: Ints
    kind: Bytes
    header: Ints
    offset: Ints
    size: Ints
    end: Ints

    @property
    def total(self) -> int:
        """The number of members."""
        return len(self.header)

    def name(self, index: int) -> bytes:
        """Return one name."""
        return self.names[index, : self.lengths[index]].tobytes()

    def take(self, which: slice | npt.NDArray[np.bool_]) -> Members:
        """Return a selection of the members."""
        return Members(*(array[which] for array in self))  # type: ignore[arg-type]

    def files(self) -> Members:
        """Return the members that are regular files."""
        return self.take(self.kind == _FILE) if self.kind.any() else self

    @staticmethod
    def join(parts: Iterable[Members]) -> Members:
        """Return the concatenation of these members."""
        parts = [part for part in parts if part.total]
        if len(parts) < 2:
            return parts[0] if parts else Members.of([])
        width = max(part.names.shape[1] for part in parts)
        names = np.concatenate([np.pad(part.names, ((0, 0), (0, width - part.names.shape[1]))) for part in parts])
        return Members(names, *(np.concatenate(arrays) for arrays in list(zip(*parts, strict=True))[1:]))

    @staticmethod
    def of(members: list[Member]) -> Members:
        """Return members as arrays."""
        texts, kinds, offset, size, header, end = zip(*members, strict=True) if members else [()] * 6
        raw = [name.encode("utf-8", "surrogateescape") for name in texts]
        width = max(map(len, raw), default=0) + 1
        names = np.frombuffer(b"".join(name.ljust(width, b"\0") for name in raw), np.uint8).reshape(len(raw), width)
        lengths = np.fromiter(map(len, raw), np.int64, len(raw))
        kind = np.fromiter(map(_KINDS.index, kinds), np.uint8, len(raw))
        return Members(names, lengths, kind, *(np.array(part, np.int64) for part in (header, offset, size, end)))


def texts(rows: Bytes, lengths: Ints) -> list[str]:
    """Return names as text: the first ``lengths[i]`` bytes of each row."""
    raw, width = rows.tobytes(), rows.shape[1]
    spans = zip(range(0, len(raw), width), lengths.tolist(), strict=True)
    if raw.isascii():
        text = raw.decode("ascii")
        return [text[start : start + length] for start, length in spans]
    return [decode_name(raw[start : start + length]) for start, length in spans]


def scan(archive: Archive, shard: str, *, start: int = 0, require_end: bool = True) -> Iterator[Members]:
    """Yield the members of an archive in order, some at a time.

    Args, raises: as `penstock.shards.walk`. If a file changes meanwhile, the error is a `ShardChangedError`, and no new
    content is yielded.

    Cost: about a third of a microsecond per small member. Memory: a window of at most 4 MiB.
    """
    shard, blocks, distance = shown(shard), _FIRST, 0.0
    position: int | None = start
    while position is not None:
        window = _whole_window(archive, position, blocks) if distance <= _NEAR else _sparse_window(archive, position)
        members, following, error = _parse(archive, shard, window, position, require_end)
        del window  # frees its bytes before others are read
        archive.check()  # after the reads, so that no changed data is yielded
        if members.total:
            yield members
        if error is not None:
            raise error
        if following is not None:
            distance = (following - position) / members.total
            blocks = min(2 * blocks, _MOST) if members.total < _ENOUGH else blocks
        position = following


def _parse(
    archive: Archive, shard: str, window: _Window, position: int, require_end: bool
) -> tuple[Members, int | None, Exception | None]:
    """Return the members whose headers are in a window, and at least one; where the next is; and the error after them.

    The next position is None at the end of the archive.
    """
    parts: list[Members] = []
    odd: list[Member] = []
    following: int | None = position
    error: Exception | None = None
    try:
        while following is not None and (following == position or following + BLOCK <= window.stop):
            found = window.members(following, archive.size)
            if found is None:
                member = member_at(archive, shard, following, require_end=require_end)
                odd += [] if member is None else [member]
                following = None if member is None else member.end
                continue
            if odd:
                parts.append(Members.of(odd))
                odd = []
            parts.append(found)
            following = int(found.end[-1])
    except Exception as caught:
        error = caught
    if odd:
        parts.append(Members.of(odd))
    return Members.join(parts), following, error


class _Window:
    """The parsed headers of a section of the archive.

    Args:
        start, stop: the bytes of the section.
        number: numbers of the blocks that look like headers, counted from ``start``, ascending.
        raw: their bytes, of shape (headers, 512).
        records: the first bytes of the data of each PAX header among them, of shape (PAX headers, 100).
    """

    def __init__(self, start: int, stop: int, number: Ints, raw: Bytes, records: Bytes) -> None:
        self._start, self.stop, self._number, self._raw = start, stop, number, raw
        kind = raw[:, 156]
        self._size: Ints = ((raw[:, 124:135].astype(np.float64) - 48) @ _OCTAL).astype(np.int64)
        high, middle, low = (_words(raw, at) for at in (124, 128, 132))
        usual = ((high & _DIGITS) == _ZEROS) & ((middle & _DIGITS) == _ZEROS) & ((low & 0xDFF8F8F8) == 0x00303030)
        usual &= _checksums_hold(raw) & (raw[:, 0] != 0) & (raw[:, _NAME - 1] == 0)
        # ustar with an empty prefix, or GNU, which uses these bytes otherwise
        rest = _words(raw, 261)
        usual &= ((rest == _USTAR) & (raw[:, 345] == 0)) | (rest == _GNU)
        is_dir, self._is_pax, self._is_file = kind == _FOLDER, kind == _PAX, kind == _REGULAR
        is_member = self._is_file | is_dir
        self._next: Ints = number + 1 + np.where(is_dir, 0, (self._size + (BLOCK - 1)) // BLOCK)
        linked = np.zeros(len(raw), bool)
        linked[:-1] = self._next[:-1] == number[1:]
        usual &= is_member | self._is_pax
        if len(records):
            before = np.flatnonzero(self._is_pax)
            usual[before] &= _set_time_only(records, self._size[before]) & linked[before]
            # Extended headers of the next member, not of another extended header.
            usual[before] &= np.append(usual & is_member, False)[before + 1]
        self._usual = usual
        # The last rows of chains.
        self._stops = np.flatnonzero(~(linked & self._usual))

    def members(self, position: int, size: int) -> Members | None:
        """Return the members of the chain of usual headers from a byte on, in an archive of a size; None: no chain."""
        block = (position - self._start) // BLOCK
        first = int(np.searchsorted(self._number, block))
        if first == len(self._number) or self._number[first] != block:
            return None
        last = int(self._stops[np.searchsorted(self._stops, first)])
        rows = first + np.flatnonzero(~self._is_pax[first : last + bool(self._usual[last])])
        offset = self._start + (self._number[rows] + 1) * BLOCK
        data = np.where(self._is_file[rows], self._size[rows], 0)
        if len(rows) and offset[-1] + data[-1] > size:
            rows, offset, data = rows[:-1], offset[:-1], data[:-1]
        if not len(rows):
            return None
        names = self._raw[rows, :_NAME]
        used = np.flatnonzero(names.any(0))
        names = names[:, : int(used[-1]) + 2]  # keeps a column of zeros
        ends = names == 0
        lengths = ends.argmax(1)
        if int(lengths.sum()) + int(ends.sum()) != names.size:  # non-zero bytes after a zero
            names = np.where(np.arange(names.shape[1]) < lengths[:, None], names, 0).astype(np.uint8)
        before = np.maximum(rows - 1, 0)
        extended = (rows > first) & self._is_pax[before]
        kind = np.where(self._is_file[rows], _FILE, _DIR).astype(np.uint8)
        header = self._start + np.where(extended, self._number[before], self._number[rows]) * BLOCK
        return Members(names, lengths, kind, header, offset, data, self._start + self._next[rows] * BLOCK)


def _whole_window(archive: Archive, start: int, blocks: int) -> _Window:
    """Return a window of all blocks of a section with the magic of a header; the archive then holds the section."""
    data = np.frombuffer(archive.hold(start, start + blocks * BLOCK), np.uint8)
    count = len(data) // BLOCK
    rows = data[: count * BLOCK].reshape(count, BLOCK)
    number = np.flatnonzero(_words(rows, 257) == _MAGIC)
    raw = rows[number]
    behind = np.minimum(number[raw[:, 156] == _PAX] + 1, count - 1)
    return _Window(start, start + count * BLOCK, number, raw, rows[behind, :_NAME])


def _sparse_window(archive: Archive, start: int) -> _Window:
    """Return a window of the usual headers of a section, read one by one: each determines the next position."""
    archive.fetch_ahead(start, start + 2 * _STRETCH)
    position, data, begin = start, b"", start
    numbers: list[int] = []
    found: list[bytes] = []
    records: list[bytes] = []
    small: dict[int, bytes] = {}
    while position < start + _STRETCH:
        at = position - begin
        if at > len(data) - 2 * BLOCK:
            data, begin, at = archive.read(position, position + _HEAD), position, 0
        try:
            digits, kind, magic = _fields(data, at)
            length = int(digits, 8)
        except (ValueError, struct.error):
            break
        if length < 0 or magic != b"usta" or kind not in b"0x" or at > len(data) - BLOCK:
            break
        numbers.append(position)
        found.append(data[at : at + BLOCK])
        position, at = position + BLOCK, at + BLOCK
        if kind == _PAX:
            records.append(data[at : at + _NAME].ljust(_NAME, b"\0"))
        if length <= BLOCK and at + length <= len(data):
            small[position] = data[at : at + length]
        position += -(-length // BLOCK) * BLOCK
    archive.small = small
    raw = np.frombuffer(b"".join(found), np.uint8).reshape(-1, BLOCK)
    first = np.frombuffer(b"".join(records), np.uint8).reshape(-1, _NAME)
    return _Window(start, start + _STRETCH, (np.array(numbers, np.int64) - start) // BLOCK, raw, first)


def _words(raw: Bytes, at: int) -> npt.NDArray[np.uint32]:
    """Return four bytes of each row as a number."""
    return raw[:, at : at + 4].view("<u4")[:, 0]


def _checksums_hold(raw: Bytes) -> npt.NDArray[np.bool_]:
    """Return whether the headers' checksums, in the usual format (six digits, NUL or space), are right."""
    stored, own = (raw[:, 148:156].astype(np.float64) @ _CHECKSUM).T
    digits = (_words(raw, 148) & _DIGITS) == _ZEROS
    digits &= (_words(raw, 152) & 0x00DFF8F8) == 0x00003030
    # In 32 bits, NumPy adds several times faster than in 64.
    return np.asarray(digits & (raw.sum(1, dtype=np.uint32) - own + 256 == stored - _OFFSET))


def _set_time_only(data: Bytes, size: Ints) -> npt.NDArray[np.bool_]:
    """Return which PAX headers, whose data begins like this and has these sizes, set nothing but the time."""
    tens, ones = data[:, 0] - np.uint8(48), data[:, 1] - np.uint8(48)
    result = (tens < 10) & (ones < 10) & (tens.astype(np.int64) * 10 + ones == size) & (size > 9)
    result &= (data[:, 2:9] == _MTIME).all(1)
    return np.asarray(result & (data[np.arange(len(data)), np.clip(size - 1, 0, _NAME - 1)] == 10))
