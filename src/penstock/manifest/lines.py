"""A text file as an array of rows: only row offsets are stored, the file is neither copied nor converted.

    offsets  [0, 23, 46, 70]          memory-mapped from the sidecar
    data     b"a/0.jpg 0\\na/1..."      memory-mapped, the file itself

Together they *are* an Arrow ``large_binary`` array: opening takes milliseconds at any size, and many rows are gathered
by Arrow's ``take``. NumPy gathers the rows of a batch: it takes microseconds longer, but saves importing Arrow, which
takes longer than everything else.

The slice of a row extends to the next row, so it may hold a line feed, a carriage return and skipped lines. The row's
*value* ends at the first line feed, without a carriage return. Slices that hold a value and one line feed take the fast
path.

Offsets are not trusted: each read checks that its slices are within the file, begin and end at line boundaries, and
hold one row. A sidecar that fails the checks is rebuilt.
"""

from __future__ import annotations

import os
from itertools import pairwise
from math import inf
from mmap import mmap
from time import monotonic
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.errors import ManifestError
from penstock.manifest.indices import as_arrow
from penstock.manifest.scan import BOM, BUFFER, CR, BadLine, LineRules, Scanner, check_is_text, line_number, read_pieces
from penstock.manifest.sidecar import Header, Sidecar, load_or_build
from penstock.progress import progress_bar
from penstock.storage import File, io_error

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["LineIndex", "TooMuch", "texts"]

Rows = npt.NDArray[np.int64]
_Slices = tuple[npt.NDArray[np.uint8], Rows]
"""The concatenated bytes of some rows, and their offsets: the begin of each, and the end of the last."""

_LF = 10
_FEW = 8  # up to this many rows, reading one by one is faster
_BATCH = 256  # up to this many rows, NumPy gathers about as fast as Arrow
_COLUMNS = np.arange(-1, 511).astype(np.uint16)  # columns of a table of rows: the byte before a row, then its bytes
_CHUNK = 1 << 17  # offsets copied at once
_LOOK_EVERY = 1e-3  # seconds; modification times have a resolution of 1 to 10 ms anyway


class _Damaged(Exception):
    """An invalid offset."""


class TooMuch(Exception):
    """The rows have more bytes than the caller accepts in one read."""


class LineIndex:
    """The rows of one text file.

    Args:
        source: the file, open.
        rules: the definition of a row.
        suffix: appended to the source's name for the sidecar.
        cache_dir: folder for the sidecar, instead of beside the source.
        progress: show a bar while building: True, False, or None for large files on a terminal.

    Raises:
        ManifestError: a binary file, a very long line, or a blank line if these are errors.
        ManifestIOError: the index cannot be written.

    Reads are safe from several threads and after a fork. Memory: none per row; mapped pages are the system's cache.
    """

    def __init__(
        self,
        source: File,
        rules: LineRules,
        *,
        suffix: str = ".pstk",
        cache_dir: str | None = None,
        progress: bool | None = None,
        buffer: int = BUFFER,
    ) -> None:
        self.source, self.rules = source, rules
        self._suffix, self._cache_dir, self._progress, self._buffer = suffix, cache_dir, progress, buffer
        self._size = source.size
        self._source_size_now = (
            source.size_now if source.map is None else source.map.size
        )  # the map's size is faster to read
        self._looked = -inf  # when `one` last checked the modification time
        check_is_text(source)
        self._load()

    def _load(self) -> None:
        sidecar = load_or_build(self.source, self._suffix, self._cache_dir, self.rules.digest(), self._build)
        self.sidecar = sidecar
        self._index_size_now, self._index_size = sidecar.map.size, sidecar.header.length
        self.rows, self.digest = sidecar.header.rows, sidecar.header.digest
        self._cr = bool(sidecar.header.flags & CR)
        self._offsets = sidecar.offsets  # a memoryview: reading single elements is faster than with NumPy
        # Begin and end of each row, side by side, so that one memory access reads both.
        self._bounds = np.ndarray((self.rows,), "V16", self._offsets, strides=(8,))
        self._data = self.source.map if self.source.map is not None else b""
        self._head = len(BOM) if self._data[: len(BOM)] == BOM else 0  # no line feed precedes the first line
        self._data_array = np.frombuffer(self._data, dtype=np.uint8)
        self._arrow: pa.LargeBinaryArray | None = None

    # ------------------------------------------------------------------ reading

    def raw(self, rows: Rows, most: int | None = None) -> pa.LargeBinaryArray:
        """Return the values of rows (each within ``[0, rows)``).

        Raises:
            TooMuch: they have more than ``most`` bytes; raised before a copy. A few rows may exceed it.
        """
        if 0 < len(rows) <= _FEW:
            return _as_arrow(list(map(self._one, rows.tolist())))
        if not self._cr and (plain := self._plain(rows, 0, most)) is not None:
            data, lengths = plain
            ends = np.zeros(len(rows) + 1, np.int64)
            np.add.accumulate(lengths, out=ends[1:])
            return _array(data, ends)
        slices, one_each = self._take(rows, most)
        if not one_each or self._cr:
            return _as_arrow(self._values(slices))
        import pyarrow.compute as pc

        return pc.binary_slice(_array(*slices), 0, -1)  # without the line feeds

    def text(self, rows: Rows) -> list[str]:
        """Return the values of rows as str; bytes that are not UTF-8 become surrogates, as in `os.fsdecode`."""
        if (plain := self._plain(rows, 1)) is not None:
            data, _ = plain
        else:
            slices, one_each = self._take(rows)
            if not one_each:
                return [value.decode("utf-8", "surrogateescape") for value in self._values(slices)]
            data = slices[0].tobytes()
        if self._cr:
            data = data.replace(b"\r\n", b"\n")
        lines = data.decode("utf-8", "surrogateescape").split("\n")
        lines.pop()
        return lines

    def one(self, row: int) -> str:
        """Return the value of one row, like `text`, in a tenth of the time.

        The source's modification time is checked once a millisecond only: the check costs half as much as the rest.
        """
        return self._one(row).decode("utf-8", "surrogateescape")

    def _one(self, row: int) -> bytes:
        now = monotonic()
        if now - self._looked > _LOOK_EVERY or self._source_size_now() != self._size:
            self.source.check()
            self._looked = now
        if self._index_size_now() == self._index_size:
            data, start, end = self._data, self._offsets[row], self._offsets[row + 1]
            if 0 <= start < end <= self._size and (start == self._head or data[start - 1] == _LF):
                line, feed, rest = data[start:end].partition(b"\n")
                if feed and not rest:
                    return line.removesuffix(b"\r") if self._cr else line
        slices, _ = self._take(np.array([row]))  # an unusual row, or a damaged index
        return self.value(slices[0].tobytes())

    def _values(self, slices: _Slices) -> list[bytes]:
        """Return the values of slices."""
        data = slices[0].tobytes()
        return [self.value(data[a:b]) for a, b in pairwise(slices[1].tolist())]

    def value(self, piece: bytes) -> bytes:
        """Return the value of a slice: up to the first line feed, less a carriage return."""
        return piece.partition(b"\n")[0].removesuffix(b"\r")

    def offset(self, row: int) -> int:
        """Return the byte offset of a row in the file."""
        self._check_files()
        return self._offsets[row]

    def line(self, row: int) -> int:
        """Return the 1-based number of a row's first line. Counts from the start of the file: for error messages."""
        return line_number(self.source, self.offset(row))

    def digests_at(self, rows: int) -> list[bytes]:
        """Return the hashes that the file may have had when it held only its first ``rows`` rows, likeliest first.

        It is unknown how many of the skipped lines after the last row existed then, and whether its line feed did.
        """
        self._check_files()
        start = self._offsets[rows - 1] if rows else 0
        piece = self._data[start : self._offsets[rows]]
        value = len(self.value(piece)) if rows else 0
        feeds = [start + k + 1 for k in range(value, len(piece)) if piece[k] == _LF]
        ends = [start + len(piece), *feeds[::-1], start + value]
        digest, begin, digests = xxhash.xxh3_128(), 0, dict[int, bytes]()
        for end in sorted(set(ends)):
            for some in read_pieces(self.source, begin, end):
                digest.update(some)
            digests[end], begin = digest.digest(), end
        return [digests[end] for end in ends]

    # ------------------------------------------------------------------ trust

    def _check_files(self) -> None:
        """Check that the mapped pages exist: reading missing ones kills the process (SIGBUS).

        A changed source is an error; an index that was truncated or modified is rebuilt.
        """
        self.source.check()
        if self._index_size_now() != self._index_size:
            self._rebuild(remove=False)  # its size already shows that it is invalid

    def _plain(self, rows: Rows, feeds: int, most: int | None = None) -> tuple[bytes, Rows] | None:
        """Return the values of a batch of short rows, with 0 or 1 line feeds each, and their lengths without these.

        The fast path for slices of a value and a line feed. It returns None for everything else, which `_take` handles:
        too many rows or bytes, the first and last rows of the file, damage. It performs all checks of `_checked`.

        The cost of a batch depends on the number of NumPy calls, not on its bytes. So rows are copied as a table of
        equal width, and their excess is cut off.
        """
        if not 0 < (count := len(rows)) <= _BATCH:
            return None
        self._check_files()
        around = self._bounds[rows].view(np.uint64) - 1  # the line feeds; unsigned, so negative offsets are huge
        before = around[::2]
        lengths = around[1::2] - before - 1
        width = int(np.maximum.reduce(lengths)) + 2
        too_much = most is not None and count * width > most
        if too_much or width > len(_COLUMNS) or int(np.maximum.reduce(around)) + width > self._size:
            return None
        # `take` releases the GIL while pages are read from a disk.
        if self._data_array.take(around.view(np.int64)).tobytes() != b"\n\n" * count:
            return None
        windows = np.ndarray((self._size - width + 1,), f"V{width}", self._data, strides=(1,))
        table = windows[before.view(np.int64)].view(np.uint8).reshape(count, width)
        inside = _COLUMNS[:width] < (lengths + feeds).astype(np.uint16)[:, np.newaxis]
        data = table[inside].tobytes()
        single = data.count(b"\n") == count if feeds else b"\n" not in data
        return (data, lengths.view(np.int64)) if single else None

    def _take(self, rows: Rows, most: int | None = None) -> tuple[_Slices, bool]:
        """Return the slices of rows, and whether each is a value and a line feed. TooMuch: see `raw`."""
        self._check_files()
        if not rows.size:
            return (np.empty(0, np.uint8), np.zeros(1, np.int64)), True
        try:
            return self._checked(rows, most)
        except _Damaged:
            self._rebuild(remove=True)
        try:
            return self._checked(rows, most)
        except _Damaged:  # the index is new, so the file changed without a new modification time
            raise self.source.changed(self.source.size) from None

    def _checked(self, rows: Rows, most: int | None) -> tuple[_Slices, bool]:
        start, end = self._check_offsets(rows)
        if most is not None and int((end - start).sum()) > most:
            raise TooMuch
        data, offsets = self._gather(rows, start, end)
        last = data.take(offsets[1:] - 1) == _LF
        ended = int(np.count_nonzero(last))
        if ended < len(rows) and (end[~last] != self.source.size).any():
            raise _Damaged  # only a file's last line may lack its line feed
        feeds = int(np.count_nonzero(data == _LF))
        if feeds != ended and not self._are_single(data.tobytes(), offsets):
            raise _Damaged
        return (data, offsets), feeds == ended == len(rows)

    def _gather(self, rows: Rows, start: Rows, end: Rows) -> _Slices:
        """Return the bytes of rows between these offsets."""
        if len(rows) <= _BATCH:
            lengths = end - start
            offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
            moved = np.repeat(start - offsets[:-1], lengths)
            return self._data_array.take(moved + np.arange(len(moved))), offsets
        if self._arrow is None:
            self._arrow = _array(self._data, self._offsets)
        return _views(self._arrow.take(as_arrow(rows)))

    def _check_offsets(self, rows: Rows) -> tuple[Rows, Rows]:
        """Return begin and end of slices; _Damaged if they are outside the file or do not begin at a line."""
        start, end = self._bounds[rows].view(np.int64).reshape(-1, 2).T
        if (
            int(np.minimum.reduce(start)) < 0
            or int(np.maximum.reduce(end)) > self.source.size
            or not (start < end).all()
        ):
            raise _Damaged
        aligned = self._data_array.take(start - 1) == _LF  # for offset 0 this is the last byte of the file
        if not aligned.all() and not (start[~aligned] == self._head).all():
            raise _Damaged
        return start, end

    def _are_single(self, data: bytes, offsets: Rows) -> bool:
        """Return whether slices of several lines hold one row each, besides blank lines and comments."""
        comment = (self.rules.comment or "\n").encode()
        for a, b in pairwise(offsets.tolist()):
            others = (line.lstrip(b" \t\r") for line in data[a:b].split(b"\n")[1:])
            if not all(not line or line.startswith(comment) for line in others):
                return False
        return True

    def _rebuild(self, *, remove: bool) -> None:
        """Rebuild a damaged sidecar. Its row count and digest must not change."""
        before, path = (self.rows, self.digest), self.sidecar.path
        if remove:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise io_error(path, error, "the index is damaged and must be removed; cannot remove") from error
        self._load()
        if (self.rows, self.digest) != before:
            raise ManifestError(
                f"the index {path} was damaged, or {self.source.path} changed, and the index was rebuilt; open the "
                "manifest again"
            )

    # ------------------------------------------------------------------ building

    def _build(self, source: File, out: BinaryIO, stale: Sidecar | None) -> Header:
        """Write the offsets. If the file was only appended to, which its hash tells, begin with its last old row."""
        scanner, digest, hashed = Scanner(self.rules, out), xxhash.xxh3_128(), 0
        with progress_bar(f"indexing {os.path.basename(source.path)}", source.size, self._progress) as progress:
            if stale is not None and stale.header.rows > 0 and stale.header.size <= source.size:
                old, hashed = stale.header, stale.header.size
                for piece in read_pieces(source, 0, hashed):
                    digest.update(piece)
                    progress(len(piece))
                last = stale.offsets[old.rows - 1]
                if digest.digest() == old.digest and 0 <= last < old.size:
                    # In chunks, since mapped pages count as memory of this process.
                    for start in range(0, old.rows - 1, _CHUNK):
                        out.write(stale.offsets[start : min(start + _CHUNK, old.rows - 1)])
                    scanner = Scanner(self.rules, out, position=last, rows=old.rows - 1, flags=old.flags)
            position = scanner.position
            try:
                for piece in read_pieces(source, position, size=self._buffer):
                    new = memoryview(piece)[max(hashed - position, 0) :]
                    digest.update(new)
                    progress(len(new))
                    scanner.feed(piece)
                    position += len(piece)
                scanner.end()
            except BadLine as error:
                line = line_number(source, error.offset)
                raise ManifestError(f"{source.path}, line {line}: {error.reason}") from None
        return Header(scanner.flags, scanner.rows, source.size, source.mtime_ns, 0, digest.digest())


def _array(data: npt.NDArray[np.uint8] | bytes | mmap, offsets: Rows | memoryview) -> pa.LargeBinaryArray:
    """Return concatenated values as an Arrow array, without a copy."""
    import pyarrow as pa  # imported late: records need no Arrow

    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(offsets) - 1, buffers)


def _as_arrow(values: list[bytes]) -> pa.LargeBinaryArray:
    return _array(b"".join(values), np.cumsum([0, *map(len, values)]))


def _views(array: pa.LargeBinaryArray) -> _Slices:
    """Return the concatenated bytes of an array's values and their offsets, without a copy."""
    _, offset_buffer, data = array.buffers()
    if not len(array) or offset_buffer is None or data is None:
        return np.empty(0, dtype=np.uint8), np.zeros(len(array) + 1, dtype=np.int64)
    offsets = np.frombuffer(offset_buffer, dtype=np.int64, count=len(array) + 1, offset=8 * array.offset)
    first, last = int(offsets[0]), int(offsets[-1])
    return np.frombuffer(data, dtype=np.uint8, count=last - first, offset=first), offsets - first if first else offsets


def texts(values: pa.LargeBinaryArray) -> list[str]:
    """Return an array of bytes as a list of str, decoded as by `os.fsdecode`."""
    view, offsets = _views(values)
    data, bounds = view.tobytes(), offsets.tolist()
    text = data.decode("utf-8", "surrogateescape")
    if len(text) == len(data):  # one character for each byte
        return [text[a:b] for a, b in pairwise(bounds)]
    return [data[a:b].decode("utf-8", "surrogateescape") for a, b in pairwise(bounds)]
