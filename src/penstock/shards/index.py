"""The index of a tar shard, ``NAME.pidx`` beside it: offsets and keys of the samples.

    byte 0     magic, version, extensions' bytes                        8s I I     (all little-endian)
    byte 16    samples, files, keys' bytes, tar size, tar mtime in ns   q q q q q
    byte 56    xxh3_128 of the tar, xxh3_64 of the body                 16s Q
    byte 80    xxh3_64 of the bytes before                              Q
    byte 128   the body: sections that begin at multiples of 8
               first       samples + 1   int64   files of sample i: first[i] to first[i + 1]
               key_at      samples + 1   int64   its key: keys[key_at[i] : key_at[i + 1]]
               header      files         int64   first byte of a file's headers, extended ones included
               offset      files         int64   first byte of its data
               size        files         int64   its length
               extension   files         int32   index into the extensions
               keys                      UTF-8
               extensions                UTF-8, concatenated, each with a trailing zero

One process writes it to a temporary file and renames it, while others wait for a lock. It can be deleted at any time. A
file that does not match this format and this shard (size and modification time) is rebuilt.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from penstock.errors import ManifestIOError, ShardError
from penstock.manifest.sidecar import places
from penstock.shards.archive import Archive
from penstock.shards.compressed import compression_of
from penstock.shards.runs import Extensions, scan_runs
from penstock.shards.tar import decode_name, rounded
from penstock.storage.derived import load_or_write
from penstock.storage.files import SHARD, File
from penstock.storage.urls import shown

__all__ = ["BODY", "SUFFIX", "ShardIndex", "ShardIndexHeader", "index_path", "load_or_build", "read_header"]

SUFFIX = ".pidx"
MAGIC, VERSION = b"PENSHARD", 1
BODY = 128
_STRUCT = struct.Struct("<8sIIqqqqq16sQ")
_CHECKSUM = struct.Struct("<Q")
_CHECKED = 32 << 20  # bodies up to this size are checked completely when they are opened

Progress = Callable[[int], object]


@dataclass(frozen=True)
class ShardIndexHeader:
    """The facts that an index records about its shard."""

    extension_bytes: int
    samples: int
    files: int
    key_bytes: int
    size: int
    mtime_ns: int
    digest: bytes
    body: int

    def pack(self) -> bytes:
        """Return the bytes before the body: fields, checksum, zeros up to `BODY`."""
        numbers = self.samples, self.files, self.key_bytes, self.size, self.mtime_ns
        head = _STRUCT.pack(MAGIC, VERSION, self.extension_bytes, *numbers, self.digest, self.body)
        return (head + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(head))).ljust(BODY, b"\0")

    @classmethod
    def unpack(cls, data: bytes) -> ShardIndexHeader | None:
        """Return the header, or None if the data is not a header of this version with a valid checksum."""
        if len(data) < BODY:
            return None
        magic, version, *fields = _STRUCT.unpack_from(data)
        (checksum,) = _CHECKSUM.unpack_from(data, _STRUCT.size)
        if magic != MAGIC or version != VERSION or checksum != xxhash.xxh3_64_intdigest(data[: _STRUCT.size]):
            return None
        return cls(*fields)

    @property
    def parts(self) -> list[tuple[int, int]]:
        """The first byte and length of each section."""
        lengths = [8 * (self.samples + 1)] * 2 + [8 * self.files] * 3 + [4 * self.files, self.key_bytes]
        result, at = [], BODY
        for length in [*lengths, self.extension_bytes]:
            result.append((at, length))
            at = -(-(at + length) // 8) * 8
        return result

    @property
    def length(self) -> int:
        """The size of the whole index in bytes."""
        return sum(self.parts[-1])

    @property
    def fingerprint(self) -> str:
        """The identity of the shard's content, 32 hex digits."""
        return self.digest.hex()


class ShardIndex:
    """A valid, mapped index. Views are int64 (``extension``: int32); reading one number takes 40 ns."""

    def __init__(self, path: Path, header: ShardIndexHeader, mapped: mmap.mmap) -> None:
        self.path, self.header, self._map = path, header, mapped
        view = memoryview(mapped)
        parts = [view[at : at + length] for at, length in header.parts]
        self.first, self.key_at, self.header_at, self.offset, self.size = (part.cast("q") for part in parts[:5])
        self.extension = parts[5].cast("i")
        self._keys = header.parts[6][0]
        self.extensions = [decode_name(name) for name in bytes(parts[7]).split(b"\0")[:-1]]

    def __len__(self) -> int:
        return self.header.samples

    def key(self, sample: int) -> str:
        """Return the key of a sample."""
        at = self._keys
        return str(self._map[at + self.key_at[sample] : at + self.key_at[sample + 1]], "utf-8", "surrogateescape")

    def span(self, sample: int) -> tuple[int, int]:
        """Return the first header byte of a sample, and the first byte after its padding."""
        begin, end = self.first[sample], self.first[sample + 1]
        if begin == end:
            return 0, 0
        return self.header_at[begin], self.offset[end - 1] + rounded(self.size[end - 1])

    @classmethod
    def load(cls, path: Path, *, checked: bool = False) -> ShardIndex | None:
        """Return the index at a path, even if stale, or None if there is no valid one.

        Args:
            path: the file.
            checked: skip the check of the body, which this process has done before.

        Raises:
            ShardIOError: the file cannot be read (too many open files).
        """
        try:
            with open(path, "rb", buffering=0) as file:
                header = ShardIndexHeader.unpack(file.read(BODY))
                if header is None or min(header.samples, header.files, header.key_bytes) < 0:
                    return None
                if os.fstat(file.fileno()).st_size != header.length:
                    return None
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (FileNotFoundError, NotADirectoryError, PermissionError, IsADirectoryError):
            return None
        except OSError as error:
            raise SHARD.error(path, error, "cannot read the index") from error
        index = cls(path, header, mapped)
        if not checked and header.length <= _CHECKED and not index.is_sound():
            return None
        ends = index.first[0], index.first[-1], index.key_at[0], index.key_at[-1], len(index.extensions)
        sound = ends[:4] == (0, header.files, 0, header.key_bytes) and (ends[4] > 0 or not header.files)
        return index if sound else None

    def is_sound(self) -> bool:
        """Return whether the body is intact, whatever its size. Reads all of it."""
        return xxhash.xxh3_64_intdigest(memoryview(self._map)[BODY:]) == self.header.body


def read_header(path: Path) -> ShardIndexHeader | None:
    """Return the header of an index, or None if there is no valid one. Costs one small read."""
    try:
        with open(path, "rb", buffering=0) as file:
            header = ShardIndexHeader.unpack(file.read(BODY))
            return header if header and os.fstat(file.fileno()).st_size == header.length else None
    except OSError:
        return None


def index_path(shard: str, cache_dir: str | None = None) -> Path | None:
    """Return the path of a shard's current index, or None."""
    status = os.stat(shard)
    for path in places(shard, SUFFIX, cache_dir):
        header = read_header(path)
        if header is not None and (header.size, header.mtime_ns) == (status.st_size, status.st_mtime_ns):
            return path
    return None


def load_or_build(
    shard: str | File,
    *,
    url: str | None = None,
    cache_dir: str | None = None,
    progress: Progress | None = None,
    checked: bool = False,
) -> ShardIndex:
    """Return the shard's index; this process builds it if there is no valid, current one.

    Args:
        shard: a local file, or an open one.
        url: its name, for messages.
        cache_dir: folder for indexes. Default: beside the shard, or the user's cache if that is read-only or full.
        progress: called with the bytes just indexed.
        checked: see `ShardIndex.load`.

    Raises:
        ShardIOError: the shard cannot be read, or the index cannot be written.
        TruncatedShardError, ShardError: the shard is damaged, or compressed.
        ShardChangedError: the shard was modified while it was indexed.
    """
    file = shard if isinstance(shard, File) else File(shard, SHARD)
    paths, name = places(file.path, SUFFIX, cache_dir), shown(url or file.path)
    built = False

    def load(path: Path) -> ShardIndex | None:
        index = ShardIndex.load(path, checked=checked)
        is_of = index is not None and (index.header.size, index.header.mtime_ns) == (file.size, file.mtime_ns)
        return index if is_of else None

    def write(out: BinaryIO) -> None:
        nonlocal built
        built = True
        file.settle()
        header, parts = _scan(file, name, progress or (lambda _: None))
        out.write(header.pack())
        for (at, _), part in zip(header.parts, parts, strict=True):
            out.write(bytes(at - out.tell()))
            out.write(part)
        file.check()

    try:
        found = load_or_write(paths, load, write)
    except (ShardError, ManifestIOError):
        raise
    except OSError as error:
        where = error.filename or paths[-1]
        raise SHARD.error(where, error, f"cannot write the index of {name} to") from error
    if progress is not None and not built:
        progress(file.size)
    return found


def _scan(file: File, url: str, progress: Progress) -> tuple[ShardIndexHeader, list[memoryview]]:
    """Return the header and the sections of a shard's index."""
    if (kind := compression_of(file.read_exact(min(6, file.size), 0))) is not None:
        raise ShardError(
            f"{url}: compressed ({kind}), so its samples cannot be reached one by one: unpack it, or read it "
            "as a stream (StreamShards)"
        )
    digest, extensions, done = xxhash.xxh3_128(), Extensions(), 0
    keys: list[bytes] = []
    columns: list[list[npt.NDArray[Any]]] = [[np.zeros(0, np.int64)] for _ in range(6)]
    archive = Archive(file)
    for run in scan_runs(archive, url, extensions=extensions):
        keys.append(run.keys[np.arange(run.keys.shape[1]) < run.key_lengths[:, None]].tobytes())
        files = run.files
        numbers = run.extensions.astype(np.int32)
        added: list[Any] = [np.diff(run.first), run.key_lengths, files.header, files.offset, files.size, numbers]
        for column, values in zip(columns, added, strict=True):
            column.append(values)
        end = min(int(files.end[-1]), file.size) if files.total else done
        for piece in archive.pieces(done, end):
            digest.update(piece)
        progress(max(0, end - done))
        done = max(done, end)
    for piece in file.pieces(done, file.size):
        digest.update(piece)
    progress(file.size - done)
    counts, lengths, *rest = map(np.concatenate, columns)
    first, key_at = (np.concatenate([[0], np.cumsum(part)]) for part in (counts, lengths))
    arrays = [part.astype("<i8") for part in (first, key_at, *rest[:3])] + [rest[3].astype("<i4")]
    names = b"".join(name.encode("utf-8", "surrogateescape") + b"\0" for name in extensions.names)
    parts = [*(array.data.cast("B") for array in arrays), memoryview(b"".join(keys)), memoryview(names)]
    body, at = xxhash.xxh3_64(), BODY
    header = ShardIndexHeader(
        len(names), len(counts), len(rest[0]), len(parts[6]), file.size, file.mtime_ns, digest.digest(), 0
    )
    for (begin, length), part in zip(header.parts, parts, strict=True):
        body.update(bytes(begin - at))
        body.update(part)
        at = begin + length
    return replace(header, body=body.intdigest()), parts
