"""Find the rows of a text: the start of each, in one pass over its bytes.

    scanner = Scanner(LineRules(), out)          out receives int64 offsets
    for piece in read_pieces(source):
        scanner.feed(piece)
    scanner.end()

Memory does not depend on the size of the text or of its lines. `LineRules` define the rows:

* a row starts after a line feed and extends to the next row;
* blank lines and comments are not rows; their bytes belong to the previous row;
* a byte order mark, and skipped lines at the start, belong to no row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.errors import ManifestError
from penstock.manifest.options import Blank
from penstock.storage import File

__all__ = [
    "BOM",
    "BUFFER",
    "CR",
    "LONGEST",
    "BadLine",
    "LineRules",
    "Scanner",
    "check_is_text",
    "hash_file",
    "json_array",
    "line_number",
    "not_text",
    "read_pieces",
    "shorten",
]

CR = 1  # flag: some row ends with a carriage return
_SKIPPED = 2  # flag: some row is followed by skipped lines

LONGEST = 64 << 20
"""Bytes of a line. A file of one line is usually not lines of samples, and its objects would need twenty times its
size.
"""
BUFFER = 512 << 10  # fits the L2 cache with its temporaries; much larger is slower
BOM = b"\xef\xbb\xbf"
_SPACE = b" \t\r"
_COMPRESSED = {b"\x1f\x8b": "gzip", b"(\xb5/\xfd": "zstd", b"PK\x03\x04": "zip", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}
_LF, _CR = 10, 13

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True)
class LineRules:
    """Which lines of a file are rows: all but blank lines, of spaces, tabs and carriage returns, and comments."""

    blank: Blank = "skip"
    comment: str | None = None

    def digest(self) -> int:
        """Return a 64-bit hash of the rules. Indexes on disk contain it, so it covers what earlier rules had."""
        rules = {"blank": self.blank, "comment": self.comment, "delimiter": None, "header": False, "space": " \t\r"}
        return xxhash.xxh3_64_intdigest(repr(sorted(rules.items())).encode())


class BadLine(Exception):
    """A line that must not be: its offset in the text, and the reason in words."""

    def __init__(self, offset: int, reason: str) -> None:
        super().__init__(offset, reason)
        self.offset, self.reason = offset, reason


def shorten(content: bytes | str, limit: int = 120) -> str:
    """Return a repr for error messages, cut to a readable length."""
    if isinstance(content, bytes):
        content = content[: 4 * limit].decode("utf-8", "surrogateescape")
    return repr(content if len(content) <= limit else content[:limit] + "...")


def line_number(source: File, offset: int, start: int = 0, line: int = 1) -> int:
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


def not_text(head: bytes) -> str:
    """Return why a file that begins with these bytes is no text; empty for text."""
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "is UTF-16; convert it first: iconv -f UTF-16 -t UTF-8"
    return f"is a binary file (NUL at byte {head.index(0)})" if b"\0" in head else ""


def check_is_text(source: File) -> None:
    """Raise ManifestError, with the likely reason, for a file that is not text."""
    head = source.read(64 << 10, 0)
    for magic, name in _COMPRESSED.items():
        if head.startswith(magic):
            raise ManifestError(f"{source.path} is compressed ({name}); decompress it first: rows are read in place")
    if head.startswith((b"PAR1", b"ARROW1")):
        kind = "parquet" if head.startswith(b"PAR1") else "arrow"
        raise ManifestError(f"{source.path} is not text but {kind}; pass format={kind!r}")
    if wrong := not_text(head):
        raise ManifestError(f"{source.path} {wrong}; a manifest is text, one sample per line")


def read_pieces(source: File, start: int = 0, end: int | None = None, *, size: int = BUFFER) -> Iterator[bytearray]:
    """Yield the bytes of a file from ``start`` to ``end``; each piece is valid until the next one.

    Raises:
        ManifestChangedError: the file shrank meanwhile.
    """
    buffer, end = bytearray(size), source.size if end is None else end
    while start < end:
        piece = buffer if end - start >= size else buffer[: end - start]
        source.read_into(memoryview(piece), start)
        yield piece
        start += len(piece)


def hash_file(source: File, progress: Callable[[int], object] = lambda count: None) -> bytes:
    """Return the xxh3_128 hash of a whole file: 16 bytes."""
    digest = xxhash.xxh3_128()
    for piece in read_pieces(source):
        digest.update(piece)
        progress(len(piece))
    return digest.digest()


class Scanner:
    """Takes the consecutive pieces of a text, and writes the start of each row, and finally the end, as int64.

    Args:
        rules: the definition of a row.
        out: receives the offsets.
        position: the offset of the first piece: 0, or the start of a row.
        rows, flags: of the text before it.

    Attributes:
        position: the offset of the next piece.
        rows: number of rows so far.
        flags: what occurs in the rows, such as `CR`.
    """

    def __init__(self, rules: LineRules, out: BinaryIO, *, position: int = 0, rows: int = 0, flags: int = 0) -> None:
        self.rules, self.out = rules, out
        self.position, self.rows, self.flags = position, rows, flags
        self._comment = (rules.comment or "").encode()
        self._suspicious = np.zeros(256, dtype=bool)  # first bytes of lines that may have to be skipped
        self._suspicious[list(b"\n" + _SPACE + self._comment[:1])] = True
        self._head = b"" if position == 0 else None  # the first bytes of the text, until they show whether it has a BOM
        self._line = position  # the start of the last line
        self._before = _LF  # the byte before the piece
        self._open: bytes | None = None  # of a last line that may have to be skipped: its bytes after the spaces

    def feed(self, piece: bytes | bytearray) -> None:
        """Take the next bytes, and write the rows that start in them.

        Raises:
            BadLine: a line of more than `LONGEST` bytes, or a blank one if these are errors.
        """
        if self._head is not None:
            piece = self._head + piece
            self._head = piece if len(piece) < len(BOM) else None
            if self._head is not None:
                return
            if piece.startswith(BOM):
                piece = piece[len(BOM) :]
                self.position = self._line = len(BOM)
        if piece:
            self._find(piece)

    def end(self) -> None:
        """Write the end of the text. Call it after the last piece."""
        if self._head:
            self._find(self._head)
        if self._open is not None:
            self._decide(self._open, ended=True)
        if self._before == _CR:
            self.flags |= CR
        self.out.write(np.int64(self.position).tobytes())

    def _find(self, data: bytes | bytearray) -> None:
        piece = np.frombuffer(data, np.uint8)
        ends = np.flatnonzero(piece == _LF)
        ends += 1
        if self._before == _CR or data.find(_CR) >= 0:  # seldom, and found faster than at the ends of lines
            self._look_for_cr(piece, ends)
        if self._open is not None:
            more = piece[: ends[0] if ends.size else None].tobytes()
            self._decide(self._open + more if self._open else more.lstrip(_SPACE), ended=ends.size > 0)
        starts = ends[:-1] if ends.size and ends[-1] == piece.size else ends
        if self._before == _LF:
            starts = np.concatenate([np.zeros(1, dtype=np.int64), starts])
        if starts.size:
            self._line = self.position + int(starts[-1])
            first = piece.take(starts)
            doubtful = np.flatnonzero(self._suspicious.take(first))
            if doubtful.size:
                starts = self._without_skipped(piece, ends, starts, first, doubtful)
            self._write(starts + self.position)
        self.position += piece.size
        self._before = int(piece[-1])
        if self.position - self._line > LONGEST:
            raise BadLine(self._line, f"does not end within {LONGEST >> 20} MiB, the limit of a row")

    def _write(self, starts: Positions) -> None:
        self.rows += starts.size
        self.out.write(starts.data)

    def _look_for_cr(self, piece: npt.NDArray[np.uint8], ends: Positions) -> None:
        first = bool(ends.size) and ends[0] == 1  # the line that ends there lies before the piece
        if (first and self._before == _CR) or (piece.take(ends[1:] - 2 if first else ends - 2) == _CR).any():
            self.flags |= CR

    def _without_skipped(
        self,
        piece: npt.NDArray[np.uint8],
        ends: Positions,
        starts: Positions,
        first: npt.NDArray[np.uint8],
        doubtful: Positions,
    ) -> Positions:
        """Return the starts without those of skipped lines, and of a last line that the next piece decides."""
        keep = np.ones(starts.size, dtype=bool)
        if self.rules.blank == "skip":
            plain = first.take(doubtful) == _LF
            keep[doubtful[plain]] = False
            doubtful = doubtful[~plain]
        lasts = ends.searchsorted(starts.take(doubtful), "right")
        for k, last in zip(doubtful.tolist(), lasts.tolist(), strict=True):
            start, whole = int(starts[k]), last < ends.size
            text = piece[start : ends[last] if whole else None].tobytes().lstrip(_SPACE)
            found = self._is_row(text, self.position + start, ended=whole)
            keep[k] = bool(found)
            self._open = text if found is None else None
        kept = keep if self._open is None else keep[:-1]
        first_kept = 0 if self.rows else int(kept.argmax()) if kept.size else 0
        if not kept[first_kept:].all():  # lines before the first row belong to no row
            self.flags |= _SKIPPED
        return starts[keep]

    def _decide(self, text: bytes, *, ended: bool) -> None:
        """Write the last line, which may have to be skipped, if it is a row; ``text`` as for `_is_row`."""
        found = self._is_row(text, self._line, ended=ended)
        self._open = text if found is None else None
        if found:
            self._write(np.array([self._line]))
        elif found is False and self.rows:
            self.flags |= _SKIPPED

    def _is_row(self, text: bytes, offset: int, *, ended: bool) -> bool | None:
        """Return whether a line is a row, by its bytes after the spaces; None if that depends on its next bytes."""
        if not text.removesuffix(b"\n"):
            if not ended:
                return None
            if self.rules.blank == "error":
                raise BadLine(offset, "blank line; blank='skip' ignores such lines")
            return False
        if not ended and len(text) < len(self._comment) and self._comment.startswith(text):
            return None
        return not self._comment or not text.startswith(self._comment)
