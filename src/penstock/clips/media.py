"""Access to the bytes of a media file on a local disk, in an object store or inside a tar archive."""

from __future__ import annotations

import errno
import io
import os
import re
import stat
from typing import Protocol

from penstock.errors import ClipError
from penstock.storage import Storage
from penstock.storage.urls import is_remote, shown

__all__ = ["ByteSource", "MediaFile", "open_file", "parse_member"]

_OF_THE_MACHINE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_MEMBER = re.compile(r"(.*\.[tT][aA][rR](?:\?[^!]*)?)!(\d+)\+(\d+)!(.*)", re.DOTALL)


class ByteSource(Protocol):
    """An open file that is read by ranges. Each read checks that the file is still the one that was opened."""

    size: int

    @property
    def fingerprint(self) -> str:
        """The version of the file: its size and modification time, or the version that the store reports."""

    def read_at(self, offset: int, size: int) -> bytes:
        """Return ``size`` bytes from ``offset`` on; fewer only at the end of the file."""


class MediaFile(io.RawIOBase):
    """A file object for FFmpeg's demuxers. It reads blocks, because demuxers request few bytes at a time."""

    _BLOCK = 1 << 18

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self._at = 0
        self._block, self._begin = b"", 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True: the file allows random access."""
        return True

    def tell(self) -> int:
        """Return the current position in bytes."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a byte, counted from the start, the current position or the end; return the new position."""
        self._at = max(0, offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._source.size}[whence])
        return self._at

    def read(self, size: int = -1) -> bytes:
        """Return ``size`` bytes from the current position; fewer only at the end of the file."""
        left = max(0, self._source.size - self._at)
        left = left if size < 0 else min(size, left)
        pieces = []
        while left:
            skip = self._at - self._begin
            if not 0 <= skip < len(self._block):
                self._block, self._begin, skip = self._source.read_at(self._at, max(left, self._BLOCK)), self._at, 0
            piece = self._block[skip : skip + left]
            if not piece:
                break
            pieces.append(piece)
            self._at += len(piece)
            left -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def open_file(name: str, storage: Storage | None) -> ByteSource:
    """Return the bytes of a file, or of a member of a tar archive.

    Raises:
        ClipError: it does not exist, or is not a regular file.
        StorageError: a store does not answer, or denies access.
    """
    place = parse_member(name)
    if place is not None:
        archive, begin, size = place
        return _ByteRange(open_file(archive, storage), begin, size)
    try:
        if not is_remote(name) and not stat.S_ISREG(os.stat(name).st_mode):
            # Opening a pipe would block until a process writes to it.
            raise ClipError(f"{shown(name)!r} is not a regular file")
        return (storage or Storage()).open(name)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ClipError(f"{shown(name)!r} does not exist") from error
    except (OSError, ValueError) as error:  # ValueError: an invalid file name
        if is_remote(name) or (isinstance(error, OSError) and error.errno in _OF_THE_MACHINE):
            raise
        raise ClipError(f"{shown(name)!r} cannot be opened: {getattr(error, 'strerror', None) or error}") from error


def parse_member(name: str) -> tuple[str, int, int] | None:
    """Return the archive, first byte and size of a tar member; None if the name is not a member's.

    >>> parse_member("a.tar!512+100!clips/7.mp4")
    ('a.tar', 512, 100)
    """
    found = _MEMBER.fullmatch(name)
    return None if found is None else (found[1], int(found[2]), int(found[3]))


class _ByteRange:
    """A range of bytes of another file, with the interface of a file."""

    def __init__(self, source: ByteSource, begin: int, size: int) -> None:
        self._source, self._begin = source, begin
        self.size = max(0, min(size, source.size - begin))
        self.fingerprint = f"{source.fingerprint}:{begin}+{size}"

    def read_at(self, offset: int, size: int) -> bytes:
        """Return ``size`` bytes from ``offset`` on; fewer only at the end of the file."""
        return self._source.read_at(self._begin + offset, max(0, min(size, self.size - offset)))
