"""The index file beside a source, ``NAME.pstk``: a checked header, then the offsets of the rows.

    byte 0    magic, version, flags                               8s I I    (all little-endian)
    byte 16   rows, size of the source, its mtime in ns           q q q
    byte 40   hash of the line rules, xxh3_128 of the source      Q 16s
    byte 64   xxh3_64 of the bytes before                         Q
    byte 128  rows + 1 offsets into the source                    q ...     (none if the source has its own)
              frames + 1 offsets into the source, and the text    qq ...    (only of compressed JSON lines)

One process writes it to a temporary file and renames it, while others wait for a lock. It can be deleted at any time.
A file that does not match this format and this source is rebuilt.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import xxhash

from penstock.errors import ManifestError
from penstock.storage import File, cache_root, io_error
from penstock.storage.derived import load_or_write
from penstock.storage.files import MANIFEST, Family

__all__ = ["BODY", "FRAMES", "NO_OFFSETS", "Sidecar", "SidecarHeader", "load_or_build", "places"]

MAGIC, VERSION = b"PENSTOCK", 1
BODY = 128  # start of the offsets; a multiple of 64, the alignment that Arrow recommends
NO_OFFSETS = 1 << 16  # flag: nothing follows the header
FRAMES = 1 << 17  # flag: the offsets of frames follow those of rows
_STRUCT = struct.Struct("<8sIIqqqQ16s")
_CHECKSUM = struct.Struct("<Q")


@dataclass(frozen=True)
class SidecarHeader:
    """The facts that a sidecar records about its source."""

    flags: int
    rows: int
    size: int
    mtime_ns: int
    rules: int
    digest: bytes

    def pack(self) -> bytes:
        """Return the bytes before the offsets: fields, checksum, zeros up to `BODY`."""
        body = _STRUCT.pack(MAGIC, VERSION, self.flags, self.rows, self.size, self.mtime_ns, self.rules, self.digest)
        return (body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))).ljust(BODY, b"\0")

    @classmethod
    def unpack(cls, data: bytes) -> SidecarHeader | None:
        """Return the header, or None if the data is not a header of this version with a valid checksum."""
        if len(data) < BODY:
            return None
        body = data[: _STRUCT.size]
        magic, version, *fields = _STRUCT.unpack(body)
        (checksum,) = _CHECKSUM.unpack_from(data, _STRUCT.size)
        if magic != MAGIC or version != VERSION or checksum != xxhash.xxh3_64_intdigest(body):
            return None
        return cls(*fields)

    @property
    def length(self) -> int:
        """Size of the sidecar in bytes, without offsets of frames."""
        return BODY if self.flags & NO_OFFSETS else BODY + 8 * (self.rows + 1)

    def describes(self, source: File) -> bool:
        """Return whether the source has the size and modification time of the indexed one."""
        return self.size == source.size and self.mtime_ns == source.mtime_ns


@dataclass(frozen=True)
class Sidecar:
    """A valid sidecar, memory-mapped. ``offsets`` holds rows + 1 values of 8 bytes, or none."""

    path: Path
    header: SidecarHeader
    map: mmap.mmap

    @classmethod
    def load(cls, path: Path, rules: int, family: Family = MANIFEST) -> Sidecar | None:
        """Return the sidecar at ``path``, even if stale, or None if there is no valid one for these rules."""
        try:
            with open(path, "rb", buffering=0) as file:
                header = SidecarHeader.unpack(file.read(BODY))
                if header is None or header.rules != rules or header.rows < 0:
                    return None
                more = os.fstat(file.fileno()).st_size - header.length
                if more < 0 or bool(more) != bool(header.flags & FRAMES) or more % 16:
                    return None
                sidecar = cls(path, header, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except (FileNotFoundError, NotADirectoryError, PermissionError, IsADirectoryError):
            return None
        except OSError as error:
            raise family.error(path, error, "cannot read the index") from error
        offsets = sidecar.offsets
        return sidecar if not offsets or 0 <= offsets[0] <= offsets[-1] == header.size else None

    @property
    def offsets(self) -> memoryview:
        """The offsets of rows, as an int64 view of the map."""
        return memoryview(self.map)[BODY : self.header.length].cast("q")


def places(source: str, suffix: str, cache_dir: str | None) -> list[Path]:
    """Return the paths where a source's sidecar may be, best first: ``cache_dir``, or beside it and the cache."""
    path = Path(source)
    beside = path.with_name(path.name + suffix)
    key = xxhash.xxh3_64_hexdigest(os.fsencode(os.path.realpath(source)))
    hidden = f"{path.name}.{key}{suffix}"
    if cache_dir is not None:
        return [Path(cache_dir) / hidden]
    try:
        return [beside, cache_root() / "manifests" / hidden]
    except OSError:
        return [beside]


Builder = Callable[[File, BinaryIO, Sidecar | None], SidecarHeader]
"""Writes the offsets to a file, whose header follows later; the stale sidecar is passed so that parts can be reused."""


def load_or_build(source: File, suffix: str, cache_dir: str | None, rules: int, build: Builder) -> Sidecar:
    """Return the source's sidecar; this process builds it if there is no valid, current one.

    Raises:
        ManifestIOError: it cannot be written anywhere, or the disk is full. No partial file remains.
        ManifestChangedError: the source was modified while it was indexed.
    """
    paths = places(source.path, suffix, cache_dir)

    def load(path: Path) -> Sidecar | None:
        sidecar = Sidecar.load(path, rules)
        return sidecar if sidecar is not None and sidecar.header.describes(source) else None

    def write(out: BinaryIO) -> None:
        source.settle()
        stale = next((old for path in paths if (old := Sidecar.load(path, rules)) is not None), None)
        out.write(bytes(BODY))
        header = replace(build(source, out, stale), rules=rules)
        source.check()
        out.seek(0)
        out.write(header.pack())

    try:
        return load_or_write(paths, load, write)
    except ManifestError:
        raise
    except OSError as error:
        where = error.filename or paths[-1]
        raise io_error(where, error, f"cannot write the index of {source.path} to") from error
