"""A text file as an array of rows: only row offsets are stored, the file is neither copied nor converted.

    offsets  [0, 23, 46, 70]          memory-mapped from the sidecar
    data     b"a/0.jpg 0\\na/1..."      memory-mapped, the file itself

Opening takes milliseconds at any size. NumPy gathers the rows of a batch: Arrow takes longer to import than everything
else.

The slice of a row extends to the next row, so it may hold a line feed, a carriage return and skipped lines. The row's
*value* ends at the first line feed, without a carriage return.

Offsets are not trusted: each read checks that its slices are within the file, begin and end at line boundaries, and
hold one row. A sidecar that fails the checks is rebuilt.
"""

from __future__ import annotations

import os
from itertools import pairwise
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import xxhash

from penstock.errors import ManifestError
from penstock.manifest.indices import Rows, as_arrow
from penstock.manifest.scan import BOM, CR, BadLine, LineRules, Scanner, check_is_text, line_number
from penstock.manifest.sidecar import Sidecar, SidecarHeader, load_or_build
from penstock.progress import progress_bar
from penstock.storage import File, io_error

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["LineIndex", "TooMuch", "texts"]

_LF = 10
_FEW = 8  # up to this many rows, reading one by one is faster
_BATCH = 256  # rows gathered at once
_COLUMNS = np.arange(-1, 511).astype(np.uint16)  # columns of a table of rows: the byte before a row, then its bytes
_CHUNK = 1 << 17  # offsets copied at once
_LOOK_EVERY = 1e-3  # seconds; modification times have a resolution of 1 to 10 ms anyway


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
    ) -> None:
        self.source, self.rules = source, rules
        self._suffix, self._cache_dir, self._progress = suffix, cache_dir, progress
        self._size = source.size
        # The map's size is faster to read.
        self._source_size_now = source.size_now if source.map is None else source.map.size
        self._looked = -inf  # when `one` last checked the modification time
        self._known_line = 0, 1  # an offset, and the number of the line there
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

    # ------------------------------------------------------------------ reading

    def raw(self, rows: Rows, most: int | None = None) -> pa.LargeBinaryArray:
        """Return the values of rows (each within ``[0, rows)``).

        Raises:
            TooMuch: they have more than ``most`` bytes; raised before a copy. A few rows may exceed it.
        """
        import pyarrow as pa  # imported late: records need no Arrow

        if most is not None and len(rows) > _FEW:
            self._check_files()
            bounds = self._bounds[rows].view(np.int64)
            if int((bounds[1::2] - bounds[::2]).sum()) > most:
                raise TooMuch
        if len(rows) > _BATCH and (many := self._many(rows)) is not None:
            return many
        data, lengths = self._values(rows, b"")
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.add.accumulate(lengths, out=offsets[1:])
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
        return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(rows), buffers)

    def text(self, rows: Rows) -> list[str]:
        """Return the values of rows as str; bytes that are not UTF-8 become surrogates, as in `os.fsdecode`."""
        lines = self._values(rows, b"\n")[0].decode("utf-8", "surrogateescape").split("\n")
        lines.pop()
        return lines

    def one(self, row: int) -> str:
        """Return the value of one row, like `text`, in a tenth of the time.

        The source's modification time is checked once a millisecond only: the check costs half as much as the rest.
        """
        now = monotonic()
        if now - self._looked > _LOOK_EVERY or self._source_size_now() != self._size:
            self.source.check()
            self._looked = now
        return self._one(row).decode("utf-8", "surrogateescape")

    def offset(self, row: int) -> int:
        """Return the byte offset of a row in the file."""
        self._check_files()
        return self._offsets[row]

    def line(self, row: int) -> int:
        """Return the 1-based number of a row's first line. Counts from the start of the file, or from the line that
        was asked for before, if that is earlier: for error messages.
        """
        offset = self.offset(row)
        known = self._known_line if self._known_line[0] <= offset else (0, 1)
        self._known_line = offset, line_number(self.source, offset, *known)
        return self._known_line[1]

    def digests_at(self, rows: int) -> list[bytes]:
        """Return the hashes that the file may have had when it held only its first ``rows`` rows, likeliest first.

        It is unknown how many of the skipped lines after the last row existed then, and whether its line feed did.
        """
        self._check_files()
        start = self._offsets[rows - 1] if rows else 0
        piece = self._data[start : self._offsets[rows]]
        value = len(piece.partition(b"\n")[0].removesuffix(b"\r")) if rows else 0
        feeds = [start + k + 1 for k in range(value, len(piece)) if piece[k] == _LF]
        ends = [start + len(piece), *feeds[::-1], start + value]
        digest, begin, digests = xxhash.xxh3_128(), 0, dict[int, bytes]()
        for end in sorted(set(ends)):
            for some in self.source.pieces(begin, end):
                digest.update(some)
            digests[end], begin = digest.digest(), end
        return [digests[end] for end in ends]

    def _values(self, rows: Rows, feed: bytes) -> tuple[bytes, Rows]:
        """Return the values of rows, each with ``feed``, a line feed or nothing, after it; and their lengths without
        it, plus those of carriage returns that were cut off.
        """
        self._check_files()
        if _FEW < len(rows) <= _BATCH and (found := self._batch(rows, feed)) is not None:
            return found
        pieces, lengths = [], [np.empty(0, np.int64)]
        for start in range(0, len(rows), _BATCH):
            some = rows[start : start + _BATCH]
            found = self._batch(some, feed) if len(some) > _FEW else None
            if found is None:
                values = [self._one(row) for row in some.tolist()]
                found = b"".join([value + feed for value in values]), np.array(list(map(len, values)), np.int64)
            pieces.append(found[0])
            lengths.append(found[1])
        return (pieces[0], lengths[1]) if len(pieces) == 1 else (b"".join(pieces), np.concatenate(lengths))

    def _many(self, rows: Rows) -> pa.LargeBinaryArray | None:
        """Return the values of slices that are one line each, which Arrow copies fastest; None for all others."""
        import pyarrow as pa
        import pyarrow.compute as pc

        self._check_files()
        start, end = self._bounds[rows].view(np.int64).reshape(-1, 2).T
        if self._cr or start.min() < 0 or end.max() > self._size or not (start < end).all():
            return None
        # For offset 0 this is the last byte of the file.
        if not ((self._data_array.take(start - 1) == _LF) | (start == self._head)).all():
            return None
        buffers = [None, pa.py_buffer(self._offsets), pa.py_buffer(self._data)]
        lines = pa.LargeBinaryArray.from_buffers(pa.large_binary(), self.rows, buffers).take(as_arrow(rows))
        _, offsets, content = lines.buffers()
        ends = np.frombuffer(offsets, np.int64, len(rows) + 1)
        data = np.frombuffer(content, np.uint8, int(ends[-1]))
        is_one_each = (data[ends[1:] - 1] == _LF).all() and np.count_nonzero(data == _LF) == len(rows)
        return pc.binary_slice(lines, 0, -1) if is_one_each else None

    def _batch(self, rows: Rows, feed: bytes) -> tuple[bytes, Rows] | None:
        """Return the same as `_values` for slices that are one line each; None for all others.

        Others are rows with skipped lines, damage, and a last line without a line feed, which `_one` handles. The cost
        of a batch depends on the number of NumPy calls, not on its bytes. So short rows are copied as a table of equal
        width, and their excess is cut off.
        """
        around = self._bounds[rows].view(np.uint64) - 1  # the line feeds; unsigned, so negative offsets are huge
        before, places, count = around[::2], around.view(np.int64), len(rows)
        lengths = around[1::2] - before - 1  # of an empty slice, huge
        width = int(np.maximum.reduce(lengths)) + 2
        if width > self._size + 1 or (self._cr and not feed):
            return None
        is_short = width <= len(_COLUMNS) and int(np.maximum.reduce(around)) + width <= self._size
        # Before the first row, place -1 is that of the last line feed of the file.
        if not is_short and not (places.min() >= (0 if self._head else -1) and places.max() < self._size):
            return None
        # `take` releases the GIL while pages are read from a disk.
        if self._data_array.take(places).tobytes() != b"\n\n" * count:
            return None
        if is_short:
            windows = np.ndarray((self._size - width + 1,), f"V{width}", self._data, strides=(1,))
            table = windows[places[::2]].view(np.uint8).reshape(count, width)
            inside = _COLUMNS[:width] < (lengths + len(feed)).astype(np.uint16)[:, np.newaxis]
            data = table[inside].tobytes()
        else:
            starts = (places[::2] + 1).tolist()
            ends = (places[1::2] + len(feed)).tolist()
            data = b"".join([self._data[start:end] for start, end in zip(starts, ends, strict=True)])
        if (data.count(b"\n") != count) if feed else (b"\n" in data):
            return None
        return data.replace(b"\r\n", b"\n") if self._cr else data, lengths.view(np.int64)

    def _one(self, row: int, *, again: bool = True) -> bytes:
        """Return the value of a row. If its offsets are damaged, the index is rebuilt first, ``again`` with it."""
        sound = self._index_size_now() == self._index_size
        if sound:
            data, start, end = self._data, self._offsets[row], self._offsets[row + 1]
            if 0 <= start < end <= self._size and (start == self._head or data[start - 1] == _LF):
                line, feed, rest = data[start:end].partition(b"\n")
                if (feed and not rest) or self._are_skipped(rest, end):
                    return line.removesuffix(b"\r") if self._cr else line
        self.source.check()
        if not again:  # the index is new, so the file changed without a new modification time
            raise self.source.changed(self._size)
        self._rebuild(remove=sound)
        return self._one(row, again=False)

    def _are_skipped(self, rest: bytes, end: int) -> bool:
        """Return whether what follows a row's line, up to ``end``, is blank lines and comments."""
        if not rest.endswith(b"\n") and end != self._size:
            return False  # only the last line of the file may lack its line feed
        comment = (self.rules.comment or "\n").encode()
        others = (line.lstrip(b" \t\r") for line in rest.split(b"\n"))
        return all(not line or line.startswith(comment) for line in others)

    # ------------------------------------------------------------------ trust

    def _check_files(self) -> None:
        """Check that the mapped pages exist: reading missing ones kills the process (SIGBUS).

        A changed source is an error; an index that was truncated or modified is rebuilt.
        """
        self.source.check()
        if self._index_size_now() != self._index_size:
            self._rebuild(remove=False)  # its size already shows that it is invalid

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

    def _build(self, source: File, out: BinaryIO, stale: Sidecar | None) -> SidecarHeader:
        """Write the offsets. If the file was only appended to, which its hash tells, begin with its last old row."""
        scanner, digest, hashed = Scanner(self.rules, out), xxhash.xxh3_128(), 0
        with progress_bar(f"indexing {os.path.basename(source.path)}", source.size, self._progress) as progress:
            if stale is not None and stale.header.rows > 0 and stale.header.size <= source.size:
                old, hashed = stale.header, stale.header.size
                for piece in source.pieces(0, hashed):
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
                for piece in source.pieces(position, source.size):
                    new = piece[max(hashed - position, 0) :]
                    digest.update(new)
                    progress(len(new))
                    scanner.feed(piece)
                    position += len(piece)
                scanner.end()
            except BadLine as error:
                line = line_number(source, error.offset)
                raise ManifestError(f"{source.path}, line {line}: {error.reason}") from None
        return SidecarHeader(scanner.flags, scanner.rows, source.size, source.mtime_ns, 0, digest.digest())


def texts(values: pa.LargeBinaryArray) -> list[str]:
    """Return an array of bytes as a list of str, decoded as by `os.fsdecode`."""
    _, offsets, buffer = values.buffers()
    if not len(values) or buffer is None:
        return [""] * len(values)
    bounds = np.frombuffer(offsets, np.int64, len(values) + 1, 8 * values.offset)
    data = memoryview(buffer)[bounds[0] : bounds[-1]].tobytes()
    places = pairwise((bounds - bounds[0]).tolist())
    text = data.decode("utf-8", "surrogateescape")
    if len(text) == len(data):  # one character for each byte
        return [text[a:b] for a, b in places]
    return [data[a:b].decode("utf-8", "surrogateescape") for a, b in places]
