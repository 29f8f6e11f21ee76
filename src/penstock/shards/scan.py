"""The files of a tar archive, found many headers at a time.

    for files in scan_files(archive, "a.tar"):       # Files: some hundreds of them, as arrays
        files.offset, files.size, files.name(0)

One step looks at a window of the archive: which blocks have the magic of a header, what sizes and checksums they hold,
and which of them are reached from the window's first header, so that a tar archive inside of a member is not taken for
members. Where headers are near each other, the window is read as a whole, and stays in memory for those who want the
data. Where they are far apart, only the headers are read, one after the other.

Usual headers (files and folders with names in their place, and a PAX header that sets the time alone, which is how
WebDataset writes) are handled in NumPy; every other one by `penstock.shards.tar`, which is also what the result is
defined by: the same members, the same errors. Of a file that is changed meanwhile the error is a `ShardChangedError`.

Memory: a window of 4 MiB at most, or some hundred headers.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.errors import ShardError
from penstock.shards.archive import Archive
from penstock.shards.header import BLOCK
from penstock.shards.tar import Member, member_at

__all__ = ["NO_FILES", "Bytes", "Files", "Ints", "Source", "scan_files"]

Source = Archive | bytes
"""A whole archive."""

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

_SMALLEST, _LARGEST = 512, 8192  # blocks that are read in one step: few at first
_ENOUGH = 1024  # headers in a step
_FAR = 14  # blocks from one header to the next, beyond which only headers are read
_MOST = 640  # headers in a step that reads nothing else
_STRETCH = 16 << 20  # bytes that such a step goes forward: a disk reads them ahead meanwhile
_TINY = 256  # bytes of a member that is kept when its header is read there
_HEAD = 2048  # bytes read at once there: a small member, and the header behind it
_MAGIC = int.from_bytes(b"usta", "little")
_FILE, _DIR, _PAX = b"05x"
_OCTAL = 8.0 ** np.arange(10, -1, -1)
_CHECKSUM = np.array([[*_OCTAL[-6:], 0, 0], [1] * 8]).T  # the number it says, and the sum of its own bytes
_OFFSET = 48 * _OCTAL[-6:].sum()
_DIGITS, _ZEROS = 0xF8F8F8F8, 0x30303030  # "0" to "7" are 48 to 55
_USTAR, _GNU = (int.from_bytes(rest, "little") for rest in (b"r\x0000", b"r  \0"))
_NAME = 100
_fields = struct.Struct("124x11s21xB100x4s").unpack_from  # size, kind and magic of a header
_MTIME = np.frombuffer(b" mtime=", np.uint8)


class Files(NamedTuple):
    """Files of an archive in order, as arrays over them.

    ``names`` has a row of bytes for each name, filled up with zeros; ``lengths`` the lengths of the names. The others
    are those of `Member`.
    """

    names: Bytes
    lengths: Ints
    header: Ints
    offset: Ints
    size: Ints
    end: Ints

    @property
    def total(self) -> int:
        """How many."""
        return len(self.header)

    def name(self, index: int) -> bytes:
        """One name."""
        return self.names[index, : self.lengths[index]].tobytes()

    def take(self, which: slice | npt.NDArray[np.bool_]) -> Files:
        """Some of them."""
        names, *others = (array[which] for array in self)
        return Files(names, *others)  # type: ignore[arg-type]

    @staticmethod
    def join(parts: list[Files]) -> Files:
        """One after the other."""
        parts = [part for part in parts if part.total]
        if len(parts) < 2:
            return parts[0] if parts else NO_FILES
        width = max(part.names.shape[1] for part in parts)
        names = np.zeros((sum(part.total for part in parts), width), np.uint8)
        row = 0
        for part in parts:
            names[row : row + part.total, : part.names.shape[1]] = part.names
            row += part.total
        return Files(names, *(np.concatenate([part[field] for part in parts]) for field in range(1, 6)))

    @staticmethod
    def of(members: list[Member]) -> Files:
        """From members of `penstock.shards.tar`."""
        raw = [member.name.encode("utf-8", "surrogateescape") for member in members]
        width = max(map(len, raw), default=0) + 1
        names = np.frombuffer(b"".join(name.ljust(width, b"\0") for name in raw), np.uint8).reshape(len(raw), width)
        lengths = np.fromiter(map(len, raw), np.int64, len(raw))
        rest = np.array([(m.header, m.offset, m.size, m.end) for m in members], np.int64).reshape(-1, 4).T
        return Files(names, lengths, *rest)


NO_FILES = Files(np.zeros((0, 1), np.uint8), *(np.zeros(0, np.int64) for _ in range(5)))


class _Window:
    """Headers of a stretch of the archive, and what they say.

    Args:
        start, stop: bytes of the archive that were looked at.
        number: blocks that look like headers, counted from ``start``, in order.
        raw: their bytes, (headers, 512).
        following: gives the first bytes of the blocks behind some of the headers, by their rows.
    """

    def __init__(self, start: int, stop: int, number: Ints, raw: Bytes, following: Callable[[Ints], Bytes]) -> None:
        self.start, self.stop, self.number, self.raw = start, stop, number, raw
        self._read(raw, following)
        linked = np.zeros(len(number), bool)
        linked[:-1] = self.next[:-1] == number[1:]
        self._stops = np.flatnonzero(~(linked & self.usual))

    def _read(self, raw: Bytes, following: Callable[[Ints], Bytes]) -> None:
        kind = raw[:, 156]
        self.size: Ints = ((raw[:, 124:135].astype(np.float64) - 48) @ _OCTAL).astype(np.int64)
        high, middle, low = (_words(raw, at) for at in (124, 128, 132))
        usual = ((high & _DIGITS) == _ZEROS) & ((middle & _DIGITS) == _ZEROS) & ((low & 0xDFF8F8F8) == 0x00303030)
        usual &= _checksums_hold(raw) & (raw[:, 0] != 0) & (raw[:, _NAME - 1] == 0)
        # ustar with an empty prefix, or GNU's, whose bytes there are something else
        rest = _words(raw, 261)
        usual &= ((rest == _USTAR) & (raw[:, 345] == 0)) | (rest == _GNU)
        is_dir, self.is_pax, self.is_file = kind == _DIR, kind == _PAX, kind == _FILE
        self.next: Ints = self.number + 1 + np.where(is_dir, 0, (self.size + (BLOCK - 1)) // BLOCK)
        if self.is_pax.any():
            usual &= ~self.is_pax | self._sets_time_only(usual, following)
        self.usual = usual & (self.is_file | is_dir | self.is_pax)

    def _sets_time_only(
        self, usual: npt.NDArray[np.bool_], following: Callable[[Ints], Bytes]
    ) -> npt.NDArray[np.bool_]:
        """Which PAX headers have one record, the time, and a usual member behind them in this window."""
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
        good &= usual[behind] & ~self.is_pax[behind] & (self.is_file | (self.raw[:, 156] == _DIR))[behind]
        result[rows[good]] = True
        return result

    def run(self, position: int) -> tuple[int, int]:
        """Rows of the usual headers from a byte on that lead from one to the next; none if there is no such header."""
        block = (position - self.start) // BLOCK
        row = int(np.searchsorted(self.number, block))
        if row == len(self.number) or self.number[row] != block:
            return 0, 0
        stop = int(self._stops[np.searchsorted(self._stops, row)])
        return row, stop + bool(self.usual[stop])

    def files(self, first: int, stop: int) -> Files:
        """The files among these rows."""
        rows = first + np.flatnonzero(self.is_file[first:stop])
        names = self.raw[rows, :_NAME]
        used = np.flatnonzero(names.any(0))
        names = names[:, : int(used[-1]) + 2 if len(used) else 1]  # at least a column of zeros
        ends = names == 0
        lengths = ends.argmax(1)
        if int(lengths.sum()) + int(ends.sum()) != names.size:  # something behind a zero
            names = np.where(np.arange(names.shape[1]) < lengths[:, None], names, 0).astype(np.uint8)
        before = np.maximum(rows - 1, 0)
        extended = (rows > first) & self.is_pax[before]
        header = self.start + np.where(extended, self.number[before], self.number[rows]) * BLOCK
        offset = self.start + (self.number[rows] + 1) * BLOCK
        return Files(names, lengths, header, offset, self.size[rows], self.start + self.next[rows] * BLOCK)

    def end(self, row: int) -> tuple[int, int]:
        """Where the data of a row ends, and where the next header is."""
        data = self.start + (int(self.number[row]) + 1) * BLOCK
        following = self.start + int(self.next[row]) * BLOCK
        return data + (int(self.size[row]) if following > data else 0), following


def _whole_window(archive: Archive, start: int, blocks: int) -> _Window:
    """All blocks of a stretch that have the magic of a header. The archive holds the stretch in memory from now on."""
    count = max(0, min((len(archive) - start) // BLOCK, blocks))
    stop = start + count * BLOCK
    archive.keep({})
    data = np.frombuffer(archive.hold(start, stop), np.uint8) if count else np.zeros(0, np.uint8)
    rows = data.reshape(count, BLOCK)
    magic = np.ndarray((count,), "<u4", data, 257, (BLOCK,)) if count else np.zeros(0, np.uint32)
    number = np.flatnonzero(magic == _MAGIC)
    return _Window(start, stop, number, rows[number], lambda which: rows[:, :_NAME][number[which] + 1])


def _sparse_window(archive: Archive, shard: str, start: int) -> _Window:
    """The headers of a stretch, read one after the other as each says where the next one is."""
    archive.fetch_ahead(start, start + 2 * _STRETCH)
    position, limit, size = start, min(start + _STRETCH, len(archive)), len(archive)
    numbers: list[int] = []
    found: list[bytes] = []
    records: dict[int, bytes] = {}  # the first bytes of PAX headers' data, by row
    small: dict[int, bytes] = {}
    data, begin, last = b"", 0, -1  # what was read last, where it begins, and where the last header in it may
    while position < limit and len(found) < _MOST:
        at = position - begin
        if not 0 <= at <= last:
            # PAX headers double what stands between the data of two large members.
            head = 2 * _HEAD if records else _HEAD
            data, begin, at = archive.read(position, min(position + head, size)), position, 0
            last = len(data) - BLOCK - _NAME
        try:
            digits, kind, magic = _fields(data, at)
            length = int(digits, 8)
        except (ValueError, struct.error):
            length = -1
        if length >= 0 and magic == b"usta" and kind in b"0x":
            if kind == _PAX:
                records[len(found)] = data[at + BLOCK : at + BLOCK + _NAME]
            numbers.append(position)
            found.append(data[at : at + BLOCK])
            position, at = position + BLOCK, at + BLOCK
            if length <= _TINY and at + length <= len(data):
                small[position] = data[at : at + length]
            position += -(-length // BLOCK) * BLOCK
            continue
        try:  # the next header is found in any case; this one is looked at once more by those who use the window
            member = member_at(archive, shard, position)
        except ShardError:
            break
        if member is None:
            break
        position = member.end
    if found:
        found[-1] = found[-1].ljust(BLOCK, b"\0")
    archive.keep(small)
    raw = np.frombuffer(b"".join(found), np.uint8).reshape(-1, BLOCK)
    number = (np.array(numbers, np.int64) - start) // BLOCK

    def following(rows: Ints) -> Bytes:
        firsts = b"".join(records[row].ljust(_NAME, b"\0") for row in rows.tolist())
        return np.frombuffer(firsts, np.uint8).reshape(-1, _NAME)

    return _Window(start, position, number, raw, following)


def _words(raw: Bytes, at: int) -> npt.NDArray[np.uint32]:
    """Four bytes of each header as a number."""
    return np.ndarray((len(raw),), "<u4", raw, at, (BLOCK,)) if len(raw) else np.zeros(0, np.uint32)


def _checksums_hold(raw: Bytes) -> npt.NDArray[np.bool_]:
    """Whether the headers' checksums, written in the usual way (six digits, NUL or space), are right."""
    stored, own = (raw[:, 148:156].astype(np.float64) @ _CHECKSUM).T
    digits = (_words(raw, 148) & _DIGITS) == _ZEROS
    digits &= (_words(raw, 152) & 0x00DFF8F8) == 0x00003030
    # In 32 bits, which NumPy adds up several times faster than in 64.
    return np.asarray(digits & (raw.sum(1, dtype=np.uint32) - own + 256 == stored - _OFFSET))


def scan_files(source: Source, shard: str, *, start: int = 0, require_end: bool = True) -> Iterator[Files]:
    """The regular files of an archive in order, a window at a time.

    Args, raises: those of `penstock.shards.tar.walk`. Files that stand before an error come before it.

    Cost: about a third of a microsecond a file where they are small.
    """
    archive = Archive.of(source)
    position, blocks, ended, far = start, _SMALLEST, False, False
    while not ended:
        window = _sparse_window(archive, shard, position) if far else _whole_window(archive, position, blocks)
        if len(window.number) < _ENOUGH:
            blocks = min(blocks * 2, _LARGEST)
        found, position, ended, error = _step(archive, shard, window, position, require_end)
        far = position - window.start > _FAR * BLOCK * max(1, len(window.number))
        del window  # what it has of the archive's bytes goes before others come
        archive.check()  # of what has just been read, so nothing is handed out that has changed
        if found.total:
            yield found
        if error is not None:
            raise error


def _step(
    archive: Archive, shard: str, window: _Window, position: int, require_end: bool
) -> tuple[Files, int, bool, Exception | None]:
    """The files from a position to the window's end, the next position, whether it is the archive's end, and the error
    that stands behind these files."""
    parts: list[Files] = []
    slow: list[Member] = []
    ended, error = False, None
    try:
        while not ended and (position < window.stop or (not parts and not slow)):
            first, stop = window.run(position)
            if stop > first and window.end(stop - 1)[0] <= len(archive):
                _flush(parts, slow)
                parts.append(window.files(first, stop))
                position = window.end(stop - 1)[1]
                continue
            member = member_at(archive, shard, position, require_end=require_end)
            if member is None:
                ended = True
            else:
                position = member.end
                if member.kind == "file":
                    slow.append(member)
    except Exception as caught:
        error = caught
    _flush(parts, slow)
    return Files.join(parts), position, ended, error


def _flush(parts: list[Files], slow: list[Member]) -> None:
    if slow:
        parts.append(Files.of(slow))
        slow.clear()
