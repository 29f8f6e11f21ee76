"""Find the rows of a text: the start of each, in one pass over its bytes.

    scanner = Scanner(LineRules(), out)          out receives int64 offsets
    for piece in source.pieces(0, source.size):
        scanner.feed(piece)
    scanner.end()

Memory: a piece, and the line that goes on after it. `LineRules` define the rows:

* a row starts after a line feed and extends to the next row;
* blank lines and comments are not rows; their bytes belong to the previous row;
* a byte order mark, and skipped lines at the start, belong to no row.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.errors import ManifestError
from penstock.manifest.options import Blank
from penstock.storage import File

__all__ = [
    "BOM",
    "CR",
    "LONGEST",
    "SURROGATE",
    "BadLine",
    "LineRules",
    "Scanner",
    "check_is_text",
    "hash_file",
    "json_array",
    "line_number",
    "not_text",
    "shorten",
]

CR = 1  # flag: some row ends with a carriage return
_SKIPPED = 2  # flag: some row is followed by skipped lines

LONGEST = 64 << 20
"""Bytes of a line. A file of one line is usually not lines of samples, and its objects would need twenty times its
size.
"""
BOM = b"\xef\xbb\xbf"
SURROGATE = re.compile("[\ud800-\udfff]")
"""What stands for a byte that is not UTF-8, as in `os.fsdecode`."""
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


def check_is_text(source: File, what: str = "a manifest") -> None:
    """Raise ManifestError, with the likely reason, for a file that is not text."""
    head = source.read(64 << 10, 0)
    for magic, name in _COMPRESSED.items():
        if head.startswith(magic):
            raise ManifestError(f"{source.path} is compressed ({name}); decompress it first: {what} is plain text")
    if head.startswith((b"PAR1", b"ARROW1")):
        kind = "parquet" if head.startswith(b"PAR1") else "arrow"
        remedy = f"pass format={kind!r}" if what == "a manifest" else f"rename it to end in .{kind}"
        raise ManifestError(f"{source.path} is not text but {kind}; {remedy}")
    if wrong := not_text(head):
        raise ManifestError(f"{source.path} {wrong}; {what} is text, one sample per line")


def hash_file(source: File, progress: Callable[[int], object] = lambda count: None) -> bytes:
    """Return the xxh3_128 hash of a whole file: 16 bytes."""
    digest = xxhash.xxh3_128()
    for piece in source.pieces(0, source.size):
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
        position: the offset of the line that has not ended yet.
        rows: number of rows so far.
        flags: what occurs in the rows, such as `CR`.
    """

    def __init__(self, rules: LineRules, out: BinaryIO, *, position: int = 0, rows: int = 0, flags: int = 0) -> None:
        self.rules, self.out = rules, out
        self.position, self.rows, self.flags = position, rows, flags
        self._comment = (rules.comment or "").encode()
        self._suspicious = np.zeros(256, dtype=bool)  # first bytes of lines that may have to be skipped
        self._suspicious[list(b"\n" + _SPACE + self._comment[:1])] = True
        self._is_start = position == 0  # until the first bytes show whether there is a BOM
        self._held = bytearray()  # the line that has not ended yet

    def feed(self, piece: bytes | bytearray | memoryview) -> None:
        """Take the next bytes, or a view of such, and write the rows that end in them.

        Raises:
            BadLine: a line of more than `LONGEST` bytes, or a blank one if these are errors.
        """
        if self._is_start:
            piece = bytes(self._held + piece) if self._held else piece
            if len(piece) < len(BOM):
                self._held = bytearray(piece)
                return
            self._is_start, self._held = False, bytearray()
            self.position = len(BOM) if piece[: len(BOM)] == BOM else 0
            piece = piece[self.position :]
        data = np.frombuffer(piece, np.uint8)
        ends = np.flatnonzero(data == _LF)
        if ends.size:
            ends += 1
            # Ten times as fast as NumPy's comparison. A view is searched with all that it is of.
            whole: Any = piece.obj if isinstance(piece, memoryview) else piece
            self._write_rows(data, ends, may_have_cr=whole.find(_CR) >= 0)
            end = int(ends[-1])
            self.position += len(self._held) + end
            self._held = bytearray(piece[end:])
        else:
            self._held += piece
        if len(self._held) > LONGEST:
            raise BadLine(self.position, f"does not end within {LONGEST >> 20} MiB, the limit of a row")

    def end(self) -> None:
        """Write the end of the text. Call it after the last piece."""
        if self._is_start:  # it has one or two bytes
            self._is_start = False
            piece, self._held = self._held, bytearray()
            self.feed(piece)
        if self._held:
            self.feed(b"\n")
            self.position -= 1
        self.out.write(np.int64(self.position).tobytes())

    def _write_rows(self, data: npt.NDArray[np.uint8], ends: Positions, *, may_have_cr: bool) -> None:
        """Write the rows among the lines that end in a piece. The first line begins with the held bytes."""
        held = self._held
        starts = np.empty_like(ends)
        starts[0], starts[1:] = -len(held), ends[:-1]
        first = data.take(starts, mode="clip")
        if held:
            first[0] = held[0]
        # Clipped: the line that ends at byte 0 lies before the piece.
        if may_have_cr and (data.take(ends - 2, mode="clip") == _CR).any():
            self.flags |= CR
        if ends[0] == 1 and held[-1:] == b"\r":
            self.flags |= CR
        doubtful = np.flatnonzero(self._suspicious.take(first))
        if doubtful.size:
            keep = np.ones(starts.size, dtype=bool)
            if self.rules.blank == "skip":
                plain = first.take(doubtful) == _LF
                keep[doubtful[plain]] = False
                doubtful = doubtful[~plain]
            for k in doubtful.tolist():
                line = ((held if k == 0 else b"") + data[max(starts[k], 0) : ends[k]].tobytes()).lstrip(_SPACE)
                if line == b"\n" and self.rules.blank == "error":
                    offset = self.position + len(held) + int(starts[k])
                    raise BadLine(offset, "blank line; blank='skip' ignores such lines")
                keep[k] = line != b"\n" and not (self._comment and line.startswith(self._comment))
            first_kept = 0 if self.rows else int(keep.argmax())
            if not keep[first_kept:].all():  # lines before the first row belong to no row
                self.flags |= _SKIPPED
            starts = starts[keep]
        self.rows += starts.size
        starts += self.position + len(held)
        self.out.write(starts.data)
