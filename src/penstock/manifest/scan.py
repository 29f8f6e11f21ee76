"""Scan a text file in one pass: the start of each row, and a hash of the whole.

The pass reads through one fixed buffer, finds line feeds with NumPy, and hashes the bytes (xxh3_128), so its memory
does not depend on the file size. `LineRules` define the rows:

* a row starts after a line feed and extends to the next row; CSV records may hold line feeds inside quotes;
* blank lines and comments are not rows; their bytes belong to the previous row;
* a byte order mark, a header, and skipped lines at the start belong to no row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from io import BytesIO
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.errors import ManifestError
from penstock.manifest.options import Blank
from penstock.manifest.row_splitter import ExactRecords, Lines, ParityRecords, Positions, RowFinder, Unclosed
from penstock.storage import SourceFile

__all__ = [
    "BOM",
    "CR",
    "MULTILINE",
    "SKIPPED",
    "LineRules",
    "Scanner",
    "check_is_text",
    "hash_file",
    "json_array",
    "line_number",
    "shorten",
]

CR = 1  # flag: some row ends with a carriage return
SKIPPED = 2  # flag: some row is followed by skipped lines
MULTILINE = 4  # flag: rows may hold line feeds

BUFFER = 512 << 10  # fits the L2 cache with its temporaries; much larger is slower
BOM = b"\xef\xbb\xbf"
_COMPRESSED = {b"\x1f\x8b": "gzip", b"(\xb5/\xfd": "zstd", b"PK\x03\x04": "zip", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}
_LF, _CR = 10, 13


@dataclass(frozen=True)
class LineRules:
    """How a file is split into rows. ``delimiter`` is the field separator of CSV records, None for plain lines.

    A line that consists of ``space`` bytes only is blank.
    """

    delimiter: str | None = None
    space: str = " \t\r"
    blank: Blank = "skip"
    comment: str | None = None
    header: bool = False

    def digest(self) -> int:
        """Return a 64-bit hash of the rules."""
        return xxhash.xxh3_64_intdigest(repr(sorted(asdict(self).items())).encode())


def shorten(content: bytes | str, limit: int = 120) -> str:
    """Return a repr for error messages, cut to a readable length."""
    if isinstance(content, bytes):
        content = content[: 4 * limit].decode("utf-8", "surrogateescape")
    return repr(content if len(content) <= limit else content[:limit] + "...")


def line_number(source: SourceFile, offset: int, start: int = 0, line: int = 1) -> int:
    """Return the 1-based line number at a byte offset, counted from the known line at ``start``."""
    while start < offset and (piece := source.read(min(1 << 20, offset - start), start)):
        line += piece.count(b"\n")
        start += len(piece)
    return line


def json_array(head: bytes) -> str:
    """Return what is wrong with JSON lines that begin as one array; empty for others."""
    if not head.removeprefix(BOM).lstrip().startswith(b"["):
        return ""
    return "a JSON array is not JSON lines: write one object a line, as `jq -c .[]` does"


def check_is_text(source: SourceFile) -> None:
    """Raise ManifestError, with the likely reason, for a file that is not text."""
    head = source.read(64 << 10, 0)
    for magic, name in _COMPRESSED.items():
        if head.startswith(magic):
            raise ManifestError(f"{source.path} is compressed ({name}); decompress it first: rows are read in place")
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise ManifestError(f"{source.path} is UTF-16; convert it first: iconv -f UTF-16 -t UTF-8")
    if head.startswith((b"PAR1", b"ARROW1")):
        kind = "parquet" if head.startswith(b"PAR1") else "arrow"
        raise ManifestError(f"{source.path} is not text but {kind}; pass format={kind!r}")
    if b"\0" in head:
        raise ManifestError(
            f"{source.path} is a binary file (NUL at byte {head.index(0)}); a manifest is text, one sample per line"
        )


def hash_file(source: SourceFile, progress: Callable[[int], object] | None = None) -> bytes:
    """Return the xxh3_128 hash of a whole file: 16 bytes."""
    return Scanner(source, LineRules(), BytesIO(), progress=progress).hash_to(source.size)


class Scanner:
    """A pass over ``source`` that writes row starts, and finally the file size, to ``out`` as int64.

    Args:
        rules: the definition of a row.
        exact: split CSV records with `ExactRecords`; used after a pass without it raised `StrayQuote`.
        buffer: bytes per read; it grows only with ``exact``, for a larger record.
        progress: called with the number of bytes of each chunk.

    After `run`: ``rows``, ``flags`` and ``digest`` (16 bytes, of the whole file). Memory: a few buffers.
    """

    def __init__(
        self,
        source: SourceFile,
        rules: LineRules,
        out: BinaryIO,
        *,
        exact: bool = False,
        buffer: int = BUFFER,
        progress: Callable[[int], object] | None = None,
    ) -> None:
        self.source, self.rules, self.out, self.progress = source, rules, out, progress
        self.rows = 0
        self.flags = 0 if rules.delimiter is None else MULTILINE
        self._finder: RowFinder = Lines()
        if rules.delimiter is not None:
            # Comments may hold any quotes, so parity would fail.
            exact = exact or rules.comment is not None
            self._finder = ExactRecords(rules.delimiter, rules.comment) if exact else ParityRecords(rules.delimiter)
        self._hash = xxhash.xxh3_128()
        self._hashed = 0
        self._bytes = bytearray(buffer)
        self._buffer = memoryview(self._bytes)
        self._space = rules.space.encode()
        self._comment = (rules.comment or "").encode()
        self._suspicious = np.zeros(256, dtype=bool)  # first bytes of lines that may have to be skipped
        self._suspicious[list(b"\n" + self._space + self._comment[:1])] = True
        self._row_start = 0  # start of the last row
        self._header = rules.header  # whether the header is still ahead
        self._before = _LF  # the byte before the chunk

    @property
    def digest(self) -> bytes:
        """The hash of the bytes read so far: of the whole file after `run`."""
        return self._hash.digest()

    def hash_to(self, end: int) -> bytes:
        """Hash the file up to ``end``, without searching for rows, and return the digest."""
        while self._hashed < end:
            self._update(self._buffer[: self._read(self._hashed, end)], self._hashed)
        return self.digest

    def run(self, start: int | None = None) -> None:
        """Scan from ``start``, which must be the start of a row (default: the whole file), to the end.

        Raises:
            ManifestError: a blank line if these are errors, or a quote that is never closed.
            ManifestChangedError: the file shrank meanwhile.
            StrayQuote: see ``exact``.
        """
        if start is None:
            position = len(BOM) if self.source.read(len(BOM), 0) == BOM else 0
        else:
            position, self._header = start, False
        self.hash_to(position)
        size, at_start = self.source.size, True
        while position < size:
            count = self._read(position, size)
            self._update(self._buffer[:count], position)
            try:
                ends, used = self._finder.find(self._buffer[:count], final=position + count == size)
            except Unclosed as error:
                near = error.args[0]
                raise self._never_closed(position + near if near or at_start else self._row_start) from None
            if not used:  # one record is longer than the buffer
                self._bytes = bytearray(2 * len(self._bytes))
                self._buffer = memoryview(self._bytes)
                continue
            chunk = np.frombuffer(self._buffer, np.uint8, used)
            self._emit(chunk, ends, position, at_start)
            at_start = bool(ends.size) and int(ends[-1]) == used
            self._before = int(chunk[-1])
            position += used
        if self._before == _CR:
            self.flags |= CR
        self.out.write(np.int64(size).tobytes())

    # ------------------------------------------------------------------ bytes

    def _read(self, position: int, end: int) -> int:
        buffer = self._buffer[: end - position]
        self.source.read_into(buffer, position)
        return len(buffer)

    def _update(self, view: memoryview, position: int) -> None:
        new = view[self._hashed - position :]  # ExactRecords reads some bytes twice
        self._hash.update(new)
        self._hashed += len(new)
        if self.progress is not None:
            self.progress(len(new))

    # ------------------------------------------------------------------ rows

    def _emit(self, chunk: npt.NDArray[np.uint8], ends: Positions, position: int, at_start: bool) -> None:
        """Write the rows that start in this chunk; ``ends`` are the positions after each line feed."""
        if ends.size and not self.flags & CR and self._ends_with_cr(chunk, ends):
            self.flags |= CR
        starts = ends[:-1] if ends.size and ends[-1] == chunk.size else ends
        if at_start:
            starts = np.concatenate([np.zeros(1, dtype=np.int64), starts])
        first = chunk.take(starts)
        doubtful = np.flatnonzero(self._suspicious.take(first))
        if doubtful.size:
            starts = self._without_skipped(starts, first, doubtful, position)
        if self._header and starts.size:
            starts, self._header = starts[1:], False
        if starts.size:
            starts = starts + position
            self.rows += starts.size
            self._row_start = int(starts[-1])
            self.out.write(starts.data)

    def _ends_with_cr(self, chunk: npt.NDArray[np.uint8], ends: Positions) -> bool:
        if ends[0] == 1 and self._before == _CR:
            return True
        return self._bytes.find(_CR, 0, chunk.size) >= 0 and bool((chunk[ends[ends > 1] - 2] == _CR).any())

    def _without_skipped(
        self, starts: Positions, first: npt.NDArray[np.uint8], doubtful: Positions, position: int
    ) -> Positions:
        keep = np.ones(starts.size, dtype=bool)
        if self.rules.blank == "skip":
            plain = first.take(doubtful) == _LF
            keep[doubtful[plain]] = False
            doubtful = doubtful[~plain]
        for k in doubtful.tolist():
            keep[k] = not self._is_skipped(position + int(starts[k]))
        first_kept = 0 if self.rows or self._header else int(keep.argmax())
        if not keep[first_kept:].all():  # lines before the first row belong to no row
            self.flags |= SKIPPED
        return starts[keep]

    def _is_skipped(self, offset: int) -> bool:
        """Return whether the line at ``offset`` is blank or a comment. Reads the file: lines may leave the chunk."""
        start = offset
        while piece := self.source.read(256, offset):
            rest = piece.lstrip(self._space)
            if rest:
                if rest[0] == _LF:
                    break
                offset += len(piece) - len(rest)
                comment = self._comment
                return bool(comment) and self.source.read(len(comment), offset) == comment
            offset += len(piece)
        if self.rules.blank == "error":
            line = line_number(self.source, start)
            raise ManifestError(f"{self.source.path}, line {line}: blank line; blank='skip' ignores such lines")
        return True

    def _never_closed(self, start: int) -> ManifestError:
        line = line_number(self.source, start)
        content = self.source.read(256, start)
        return ManifestError(
            f"{self.source.path}, line {line}: a quoted field in the record that starts here is never closed: "
            f"{shorten(content)}"
        )
