"""A text file as an array of rows, by the offsets of its rows alone: the file is neither copied nor converted.

    offsets  [0, 23, 46, 70]          memory-mapped from the sidecar
    data     b"a/0.jpg 0\\na/1..."      memory-mapped, the file itself

Together they *are* an Arrow ``large_binary`` array: opening costs milliseconds at any size, and gathering many rows is
Arrow's ``take``. For as many as a batch has NumPy gathers them, in microseconds more and without importing Arrow, which
takes longer than all the rest.

The slice of a row runs to the next row and so may hold a line feed, a carriage return and skipped lines; its *value*
ends at the first line feed (in CSV: outside quotes), less a carriage return. The header's flags tell which of these
there are, and where slices hold a value and one line feed the fast path is taken.

No offset is trusted: each read checks that its slices lie within the file, begin and end where a line does, and hold
one row (in CSV, where a row may have many lines, the parser sees to that). A sidecar that fails is built again.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from io import BytesIO
from itertools import pairwise
from math import inf
from mmap import mmap
from time import monotonic
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import numpy.typing as npt

from penstock.errors import ManifestError
from penstock.manifest.indices import as_arrow
from penstock.manifest.row_splitter import ExactRecords, StrayQuote
from penstock.manifest.scan import BOM, BUFFER, CR, MULTILINE, SKIPPED, LineRules, Scanner, check_is_text, line_number
from penstock.manifest.sidecar import DATA, Header, Sidecar, load_or_build
from penstock.progress import progress_bar
from penstock.storage import SourceFile, io_error

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["LineIndex", "TooMuch", "texts"]

Rows = npt.NDArray[np.int64]
_Slices = tuple[npt.NDArray[np.uint8], Rows]
"""The bytes of some rows, one row after the other, and where in them each begins, and the last one ends."""

_LF = 10
_FEW = 8  # rows that are read faster one by one
_BATCH = 256  # rows that NumPy gathers about as fast as Arrow
_COLUMNS = np.arange(-1, 511).astype(np.uint16)  # of a table of rows: the byte before them, and then from their first
_LOOK_EVERY = 1e-3  # seconds; the modification times themselves move in steps of 1 to 10 ms


class _Damaged(Exception):
    """An offset that cannot be right."""


class TooMuch(Exception):
    """Rows have more bytes than the caller wants at once."""


class LineIndex:
    """The rows of one text file.

    Args:
        source: the file, open.
        rules: what a row is.
        suffix: what the sidecar's name has after the source's.
        cache_dir: folder for the sidecar, instead of beside the source.
        progress: show a bar while building: True, False, or None for large files on a terminal.

    Raises:
        ManifestError: binary file, blank line where they are errors, unclosed quote.
        ManifestIOError: the index cannot be written.

    Reads are safe from several threads and after a fork. Memory: none per row; mapped pages are the system's cache.
    """

    def __init__(
        self,
        source: SourceFile,
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
        self._source_size_now = source.size_now if source.map is None else source.map.size  # the map's is faster
        self._looked = -inf  # when `one` last looked at the modification time
        check_is_text(source)
        self._load()

    def _load(self) -> None:
        sidecar = load_or_build(self.source, self._suffix, self._cache_dir, self.rules.digest(), self._build)
        self.sidecar = sidecar
        self._index_size_now, self._index_size = sidecar.map.size, sidecar.header.length
        self.rows, self.digest = sidecar.header.rows, sidecar.header.digest
        flags = sidecar.header.flags
        self.multiline, self._skipped, self._cr = bool(flags & MULTILINE), bool(flags & SKIPPED), bool(flags & CR)
        self._offsets = sidecar.offsets  # a memoryview: single elements are faster than NumPy's
        # Where each row begins and ends, side by side, so that both are had with one look at memory.
        self._bounds = np.ndarray((self.rows,), "V16", self._offsets, strides=(8,))
        self._data = self.source.map if self.source.map is not None else b""
        self._head = len(BOM) if self._data[: len(BOM)] == BOM else 0  # no line feed is before the first line
        self._data_array = np.frombuffer(self._data, dtype=np.uint8)
        self._arrow: pa.LargeBinaryArray | None = None

    # ------------------------------------------------------------------ reading

    def raw(self, rows: Rows, most: int | None = None) -> pa.LargeBinaryArray:
        """The values of rows (each within ``[0, rows)``). TooMuch, before anything is copied, if they have more than
        ``most`` bytes; a few may have."""
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
        """The values of rows as str; bytes that are not UTF-8 become surrogates, as in file names (`os.fsdecode`)."""
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
        """The value of one row; like `text`, in a tenth of the time.

        The source's modification time, which costs as much as half of the rest, is looked at once a millisecond.
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
        slices, _ = self._take(np.array([row]))  # an unusual row, or damage to repair
        return self.value(slices[0].tobytes())

    def _values(self, slices: _Slices) -> list[bytes]:
        """The values of slices."""
        data = slices[0].tobytes()
        return [self.value(data[a:b]) for a, b in pairwise(slices[1].tolist())]

    def value(self, piece: bytes) -> bytes:
        """The value of a slice: up to the first line feed (in CSV: outside quotes), less a carriage return."""
        end = piece.find(b"\n")
        if 0 <= end < len(piece) - 1 and self.multiline:
            end = self._first_record(piece) if self._skipped else len(piece) - piece.endswith(b"\n")
        return (piece if end < 0 else piece[:end]).removesuffix(b"\r")

    def _first_record(self, piece: bytes) -> int:
        """Where the first record ends in a piece that begins with one and holds skipped lines after it."""
        ends, _ = ExactRecords(self.rules.delimiter or ",", None).find(memoryview(piece), final=False)
        return int(ends[0]) - 1 if ends.size else -1

    def offset(self, row: int) -> int:
        """Where a row starts in the file."""
        self._check_files()
        return self._offsets[row]

    def line(self, row: int) -> int:
        """The 1-based number of a row's first line. Counts from the start of the file: for error messages."""
        return line_number(self.source, self.offset(row))

    def digests_at(self, rows: int) -> list[bytes]:
        """Hashes that the file may have had when it ended with its first ``rows`` rows, the likeliest first.

        It is not known how many of the skipped lines after that row were there already, and whether it had its line
        feed.
        """
        self._check_files()
        start = self._offsets[rows - 1] if rows else 0
        piece = self._data[start : self._offsets[rows]]
        value = len(self.value(piece)) if rows else 0
        feeds = [start + k + 1 for k in range(value, len(piece)) if piece[k] == _LF]
        ends = [start + len(piece), *feeds[::-1], start + value]
        scanner = Scanner(self.source, self.rules, BytesIO())
        digests = {end: scanner.hash_to(end) for end in sorted(set(ends))}
        return [digests[end] for end in ends]

    # ------------------------------------------------------------------ trust

    def _check_files(self) -> None:
        """Look whether the pages that a read needs are there: missing ones kill the process (SIGBUS).

        A source that changed is an error; an index that somebody truncated or wrote to is built again.
        """
        self.source.check()
        if self._index_size_now() != self._index_size:
            self._heal(remove=False)  # nobody takes it for a sound one

    def _plain(self, rows: Rows, feeds: int, most: int | None = None) -> tuple[bytes, Rows] | None:
        """The values of a batch of short rows, each with so many line feeds (0 or 1), and their lengths without, where
        each slice is a value and a line feed. None for anything else, which `_take` sees to: too many rows or bytes,
        the first and the last rows of the file, damage.

        It looks at all that `_checked` looks at. What a batch costs is not its bytes but how many calls NumPy gets, so
        rows are copied as a table of equal ones, of which the ends are cut off.
        """
        if not 0 < (count := len(rows)) <= _BATCH:
            return None
        self._check_files()
        around = self._bounds[rows].view(np.uint64) - 1  # the line feeds; without a sign what is negative is huge
        before = around[::2]
        lengths = around[1::2] - before - 1
        width = int(np.maximum.reduce(lengths)) + 2
        too_much = most is not None and count * width > most
        if too_much or width > len(_COLUMNS) or int(np.maximum.reduce(around)) + width > self._size:
            return None
        # By `take`, which lets go of Python's lock, since the pages may have to come from a disk.
        if self._data_array.take(around.view(np.int64)).tobytes() != b"\n\n" * count:
            return None
        windows = np.ndarray((self._size - width + 1,), f"V{width}", self._data, strides=(1,))
        table = windows[before.view(np.int64)].view(np.uint8).reshape(count, width)
        inside = _COLUMNS[:width] < (lengths + feeds).astype(np.uint16)[:, np.newaxis]
        data = table[inside].tobytes()
        single = data.count(b"\n") == count if feeds else b"\n" not in data
        return (data, lengths.view(np.int64)) if single else None

    def _take(self, rows: Rows, most: int | None = None) -> tuple[_Slices, bool]:
        """The slices of rows, and whether all are a value and a line feed. TooMuch: see `raw`."""
        self._check_files()
        if not rows.size:
            return (np.empty(0, np.uint8), np.zeros(1, np.int64)), True
        try:
            return self._checked(rows, most)
        except _Damaged:
            self._heal(remove=True)
        try:
            return self._checked(rows, most)
        except _Damaged:  # a sound index cannot be wrong, so the file was changed behind its times
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
        if feeds != ended and not self.multiline and not self._are_single(data.tobytes(), offsets):
            raise _Damaged
        return (data, offsets), feeds == ended == len(rows)

    def _gather(self, rows: Rows, start: Rows, end: Rows) -> _Slices:
        """The bytes of rows, which lie between these offsets."""
        if len(rows) <= _BATCH:
            lengths = end - start
            offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
            moved = np.repeat(start - offsets[:-1], lengths)
            return self._data_array.take(moved + np.arange(len(moved))), offsets
        if self._arrow is None:
            self._arrow = _array(self._data, self._offsets)
        return _views(self._arrow.take(as_arrow(rows)))

    def _check_offsets(self, rows: Rows) -> tuple[Rows, Rows]:
        """Where slices begin and end. _Damaged if they lie outside of the file or do not begin where a line does."""
        start, end = self._bounds[rows].view(np.int64).reshape(-1, 2).T
        if (
            int(np.minimum.reduce(start)) < 0
            or int(np.maximum.reduce(end)) > self.source.size
            or not (start < end).all()
        ):
            raise _Damaged
        aligned = self._data_array.take(start - 1) == _LF  # for 0 that is the last byte, whatever it is
        if not aligned.all() and not (start[~aligned] == self._head).all():
            raise _Damaged
        return start, end

    def _are_single(self, data: bytes, offsets: Rows) -> bool:
        """Whether slices of several lines hold one row each, the other lines being blank or comments. Not for CSV."""
        space, comment = self.rules.space.encode(), (self.rules.comment or "\n").encode()
        for a, b in pairwise(offsets.tolist()):
            others = (line.lstrip(space) for line in data[a:b].split(b"\n")[1:])
            if not all(not line or line.startswith(comment) for line in others):
                return False
        return True

    def _heal(self, *, remove: bool) -> None:
        """Build a damaged sidecar again. What it said of the source must turn out the same."""
        before, path = (self.rows, self.digest), self.sidecar.path
        if remove:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise io_error(path, error, "the index is damaged and must be removed; cannot remove") from error
        self._load()
        if (self.rows, self.digest) != before:
            raise ManifestError(
                f"the index {path} was damaged, or {self.source.path} changed, and it has been built again; open the "
                "manifest again"
            )

    # ------------------------------------------------------------------ building

    def _build(self, source: SourceFile, out: BinaryIO, stale: Sidecar | None) -> Header:
        with progress_bar(f"indexing {os.path.basename(source.path)}", source.size, self._progress) as progress:
            scanner = self._append(source, out, stale, progress) if stale is not None else None
            if scanner is None:
                out.seek(DATA)
                out.truncate()
                scanner = self._scanner(source, out, progress)
                try:
                    scanner.run()
                except StrayQuote:
                    out.seek(DATA)
                    out.truncate()
                    scanner = self._scanner(source, out, progress, exact=True)
                    scanner.run()
        return Header(scanner.flags, scanner.rows, source.size, source.mtime_ns, 0, scanner.digest)

    def _scanner(
        self, source: SourceFile, out: BinaryIO, progress: Callable[[int], object], *, exact: bool = False
    ) -> Scanner:
        return Scanner(source, self.rules, out, exact=exact, buffer=self._buffer, progress=progress)

    def _append(
        self, source: SourceFile, out: BinaryIO, stale: Sidecar, progress: Callable[[int], object]
    ) -> Scanner | None:
        """Index a file that was only appended to: verify what was there by its hash, scan from its last row on."""
        old = stale.header
        if not old.rows > 0 or old.size > source.size:
            return None
        scanner = self._scanner(source, out, progress)
        if scanner.hash_to(old.size) != old.digest:
            return None
        offsets = stale.offsets
        last = offsets[old.rows - 1]
        if not 0 <= last < old.size:
            return None
        for start in range(0, old.rows - 1, 1 << 17):  # in pieces, for the pages of a map are memory of this process
            out.write(offsets[start : min(start + (1 << 17), old.rows - 1)])
        scanner.rows, scanner.flags = old.rows - 1, old.flags
        try:
            scanner.run(last)
        except StrayQuote:
            return None
        return scanner


def _array(data: npt.NDArray[np.uint8] | bytes | mmap, offsets: Rows | memoryview) -> pa.LargeBinaryArray:
    """Values that lie one after the other, as an array of Arrow's. Nothing is copied."""
    import pyarrow as pa  # only here: records are read without

    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(offsets) - 1, buffers)


def _as_arrow(values: list[bytes]) -> pa.LargeBinaryArray:
    return _array(b"".join(values), np.cumsum([0, *map(len, values)]))


def _views(array: pa.LargeBinaryArray) -> _Slices:
    """The bytes of all values of an array, one after the other, and their offsets in them. Nothing is copied."""
    _, offset_buffer, data = array.buffers()
    if not len(array) or offset_buffer is None or data is None:
        return np.empty(0, dtype=np.uint8), np.zeros(len(array) + 1, dtype=np.int64)
    offsets = np.frombuffer(offset_buffer, dtype=np.int64, count=len(array) + 1, offset=8 * array.offset)
    first, last = int(offsets[0]), int(offsets[-1])
    return np.frombuffer(data, dtype=np.uint8, count=last - first, offset=first), offsets - first if first else offsets


def texts(values: pa.LargeBinaryArray) -> list[str]:
    """An array of bytes as a list of str, as `os.fsdecode` would make them."""
    view, offsets = _views(values)
    data, bounds = view.tobytes(), offsets.tolist()
    text = data.decode("utf-8", "surrogateescape")
    if len(text) == len(data):  # one character for each byte
        return [text[a:b] for a, b in pairwise(bounds)]
    return [data[a:b].decode("utf-8", "surrogateescape") for a, b in pairwise(bounds)]
