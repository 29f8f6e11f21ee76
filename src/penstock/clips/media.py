"""`Media`: the bytes of a file of video or sound, wherever it lies: on this disk, in a store, in a tar archive."""

from __future__ import annotations

import io
from typing import Protocol

__all__ = ["Bytes", "Media"]


class Bytes(Protocol):
    """Reads ranges, and checks that they are those of the file that was opened."""

    size: int

    @property
    def fingerprint(self) -> str:
        """The version of the file: its size and time, or the store's word."""

    def read_at(self, offset: int, size: int) -> bytes:
        """``size`` bytes from ``offset`` on, fewer at the end alone."""


class Media(io.RawIOBase):
    """Bytes as a file object, which FFmpeg's demuxers read; in blocks, since they ask for little at a time."""

    _BLOCK = 1 << 18

    def __init__(self, source: Bytes) -> None:
        self._source = source
        self._at = 0
        self._block, self._begin = b"", 0

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True: bytes are read wherever they are."""
        return True

    def tell(self) -> int:
        """Return where the file stands."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a byte, counted from the beginning, from here, or from the end; return where that is."""
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._source.size}[whence])
        return self._at

    def read(self, size: int = -1) -> bytes:
        """Up to so many bytes from where the file stands; none at the end."""
        size = self._source.size - self._at if size < 0 else size
        skip = self._at - self._begin
        if not 0 <= skip < len(self._block):
            self._block, self._begin, skip = self._source.read_at(self._at, max(size, self._BLOCK)), self._at, 0
        piece = self._block[skip : skip + size]
        self._at += len(piece)
        return piece
