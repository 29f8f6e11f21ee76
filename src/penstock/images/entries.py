"""An index of entries: points where decoding of a manifest's JPEGs can begin. The file is ``train.txt.entries``.

A crop from the middle of a JPEG requires entropy decoding of all data before it. `write_index` scans each image once
and stores the result of `native.entries_of`. A crop is then decoded from the nearest entries on, to the same pixels:

    manifest = Manifest.open("train.txt", root="/data/imagenet")
    report = write_index(manifest)
    index = ImageIndex.open(report.path, manifest)
    entries = index.entries(row, data)      # for `decode_region(data, ..., entries=entries)`; None: no entries

The file is a header, a table with a row per manifest row, and the entries (all little-endian):

    byte 0    magic, version, step, rows, file size, fingerprint     8s I I q q 16s   (size -1: the file grows)
    byte 48   xxh3_64 of the bytes before                            Q
    byte 64   per row: offset, hash, number of bytes                 Q Q I  (0 bytes: no entries)

The hash is that of the image file's bytes, seeded with the hash of the entries. So damaged entries, and entries of
another file or of an older version of it, are detected at every use and never cause wrong pixels. The fingerprint is
the whole manifest's, so the index of another manifest is refused (`StateError`). The index of a tar shard has the same
format, with the fingerprint of the shard and a row per sample (`penstock.shards.entries`).
`penstock.images.learned_index` builds such a file while images are decoded.

Memory: `write_index` uses 20 bytes per row; an open index uses none and is read with two system calls per image.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import xxhash

from penstock.errors import ConfigError, ImageError, ManifestError, ManifestIOError, StateError
from penstock.images import native
from penstock.images.decode import read_bytes
from penstock.manifest import Manifest, Record
from penstock.storage import File, Storage, io_error, write_atomically
from penstock.threads import map_blocks
from penstock.warn_once import WarnOnce

__all__ = [
    "MAX_ERRORS",
    "ROW",
    "STEP",
    "TABLE",
    "ImageEntries",
    "ImageIndex",
    "IndexReport",
    "IndexWriter",
    "Origin",
    "UnreadImage",
    "compute_entries",
    "index_path",
    "pack_header",
    "whole_rows",
    "write_index",
]

MAX_ERRORS = 1000
"""The maximum number of unreadable images that a report lists."""
STEP = 8
"""The default distance of entries in MCUs."""
_BLOCK = 64  # rows per task: entries stay in memory until earlier blocks are written
_MAGIC, _VERSION = b"PSENTRY\0", 1
_HEAD = struct.Struct("<8sIIqq16s")
_CHECKSUM = struct.Struct("<Q")
TABLE = 64
"""Offset of the table in bytes."""
ROW = struct.Struct("<QQI")
"""A row of the table: offset, hash, bytes. Zeros: the image was not scanned; a hash with 0 bytes: it has no entries."""
_GROWS = -1  # size in the header of a file that grows
_ROWS = np.dtype([("offset", "<u8"), ("hash", "<u8"), ("bytes", "<u4")])


class Origin(NamedTuple):
    """The kind of the indexed images' source, and the command that builds an index, for messages."""

    name: str
    make: str


_MANIFEST = Origin("manifest", "penstock images index FILE")


class UnreadImage(NamedTuple):
    """An image that could not be read: its row, its path and the reason."""

    row: int
    path: str
    message: str


class IndexReport(NamedTuple):
    """The result of `write_index`."""

    path: Path
    """Path of the index."""
    images: int
    indexed: int
    """Number of images with entries."""
    nbytes: int
    """Total size of the images."""
    unread: int
    """Number of images that could not be read."""
    errors: list[UnreadImage]
    """The first `MAX_ERRORS` unreadable images, by row."""


class ImageEntries(NamedTuple):
    """The entries of an image (empty if it has none), and the hash of entries and image bytes."""

    entries: bytes
    hash: int

    @classmethod
    def of(cls, data: bytes | bytearray | memoryview, entries: bytes) -> ImageEntries:
        """Return an object for these entries of these image bytes."""
        return cls(entries, _hash(data, entries))

    def is_of(self, data: bytes | bytearray | memoryview) -> bool:
        """Return whether the entries belong to these image bytes."""
        return _hash(data, self.entries) == self.hash


class _Block(NamedTuple):
    """The result for a block of images."""

    entries: list[tuple[int, ImageEntries]]
    """(row, entries) of the images with entries."""
    nbytes: int
    errors: list[UnreadImage]


def compute_entries(data: bytes | bytearray | memoryview, step: int = STEP) -> ImageEntries | None:
    """Compute the entries of an image file; None if it has none. Cost: two fifths of a decode."""
    entries = native.entries_of(data, step=step)
    return None if entries is None else ImageEntries.of(data, entries)


def index_path(manifest: Manifest) -> Path:
    """Return the default path of a manifest's index: beside its file.

    Raises `ConfigError` for a manifest of several files or of a server, which needs an explicit path.
    """
    if len(manifest.sources) != 1:
        what = f"of {len(manifest.sources)} files" if manifest.sources else "of a server"
        raise ConfigError(
            f"a manifest {what} has no default path for its index of entries: pass a path (--out of penstock images "
            "index, path= of write_index, index= of ImageDataset)"
        )
    source = Path(manifest.sources[0])
    return source.with_name(source.name + ".entries")


def write_index(
    manifest: Manifest,
    *,
    step: int = STEP,
    path: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> IndexReport:
    """Write the entries of all images of `manifest` to `path` (default: `index_path`), atomically.

    Each row of MCUs has an entry every `step` MCUs (8 or 16 pixels each). `workers` threads (default: 4 per CPU, at
    most 32) read the files; `progress` is called from time to time with the number of finished rows and of all rows.
    For a view, only its rows get entries. Images without entries and unreadable ones are left out; the report lists the
    unreadable ones.

    Raises `ConfigError` without the C extension, for a step outside 1 to 65,535, and if `path` is a file other than an
    index, which is not overwritten; `ImageError` if no image has entries, `ManifestError` for lines that do not parse,
    `ManifestIOError` if the index cannot be written.

    Cost: the files are read once; two fifths of a decode per image. Size: with a step of 8, 3 % of photographs.
    """
    native.require("an index of entries needs")
    if not 1 <= step <= 65535:
        raise ConfigError(f"step must be from 1 to 65,535 MCUs, not {step}")
    target = index_path(manifest) if path is None else Path(path)
    _check_target(target)
    storage, images = manifest.storage, len(manifest)

    def find(part: range) -> _Block:
        return _entries_of(manifest.records(part), step, storage)

    try:
        with write_atomically(target) as file:
            writer = IndexWriter(file, whole_rows(manifest))
            nbytes, unread, errors = 0, 0, list[UnreadImage]()
            for part, found in map_blocks(find, images, block=_BLOCK, workers=workers):
                for row, entries in found.entries:
                    writer.add(row, entries)
                nbytes += found.nbytes
                unread += len(found.errors)
                errors.extend(found.errors[: MAX_ERRORS - len(errors)])
                if progress is not None:
                    progress(part.stop, images)
            if not writer.indexed:
                raise _nothing(images, errors)
            writer.finish(step, manifest.whole_fingerprint)
    except ManifestIOError:  # reading the manifest failed
        raise
    except OSError as error:
        doing = "cannot write an index of entries (choose another path with path=, or --out on the command line) to"
        raise io_error(target, error, doing) from error
    return IndexReport(target, images, writer.indexed, nbytes, unread, errors)


def _check_target(path: Path) -> None:
    """Refuse to overwrite a file that is not an index, such as a manifest."""
    try:
        with path.open("rb") as file:
            found = file.read(len(_MAGIC))
    except OSError:
        return  # it does not exist, or writing will report the error
    if found not in (b"", _MAGIC):
        raise ConfigError(f"{path} exists and is not an index of entries: choose another path, or remove it")


class IndexWriter:
    """Writes an index to a file: first the entries, then table and header at the start."""

    def __init__(self, file: BinaryIO, rows: int) -> None:
        self._file, self._table = file, np.zeros(rows, _ROWS)
        self._end = TABLE + self._table.nbytes
        self.indexed = 0
        """Number of rows with entries."""
        file.seek(self._end)

    def add(self, row: int, found: ImageEntries) -> None:
        """Write the entries of a row's image."""
        self._table[row] = self._end, found.hash, len(found.entries)
        self._end += self._file.write(found.entries)
        self.indexed += 1

    def finish(self, step: int, fingerprint: str) -> None:
        """Write header and table."""
        self._file.seek(0)
        self._file.write(pack_header(fingerprint, len(self._table), step, size=self._end))
        self._file.write(self._table.tobytes())


class ImageIndex:
    """An open index with the entries of a manifest's or a shard's images.

    Safe in threads and after a fork. A pickle contains only the path and the expected fingerprint.
    """

    def __init__(
        self, path: Path, fingerprint: str, rows: int, of: Origin = _MANIFEST, *, once: WarnOnce | None = None
    ) -> None:
        """Use `ImageIndex.open`. Indexes with the same `once` share one warning."""
        self.path = path
        self.fingerprint = fingerprint
        """Fingerprint of the whole manifest or of the shard."""
        self.rows = rows
        self._of = of
        try:
            self._file = File(str(path))
        except ManifestIOError as error:
            failed = ManifestIOError(f"no index of entries (build one with: {of.make}): {error}")
            failed.errno = error.errno
            raise failed from error
        self.step, size = _check_header(self._file, fingerprint, rows, of)
        """Distance of entries in MCUs."""
        self.grows = size == _GROWS
        """Whether new entries are appended to the file; see `penstock.images.learned_index`."""
        self._once = WarnOnce() if once is None else once

    @classmethod
    def open(cls, path: str | os.PathLike[str], manifest: Manifest) -> ImageIndex:
        """Open the index at `path`, which must belong to the current content of `manifest`, or of its whole if a view.

        Raises `ManifestIOError` (missing), `ManifestError` (another kind of file, or damaged), `StateError` (another
        manifest).
        """
        return cls(Path(path), manifest.whole_fingerprint, whole_rows(manifest))

    def __len__(self) -> int:
        return self.rows

    def __reduce__(self) -> tuple[type[ImageIndex], tuple[Path, str, int, Origin]]:
        return ImageIndex, (self.path, self.fingerprint, self.rows, self._of)

    def __repr__(self) -> str:
        return f"ImageIndex({str(self.path)!r})"

    def entries(self, row: int, data: bytes | bytearray | memoryview) -> bytes | None:
        """Return the entries of an image for `decode_region`; None if it has none.

        `data` is the whole image file. `row` is the row in the whole manifest (`Record.row`), or the number of the
        sample in the shard. Entries of other bytes are not returned; a warning is issued once per process.

        Raises `IndexError` for a row out of range, `ManifestError` if the index was truncated meanwhile.

        Cost: two reads from the page cache, and a hash of `data`: 15 us for 100 kB.
        """
        found = self._find(row)
        if found is None or found.is_of(data):
            return (found and found.entries) or None
        self._once.warn(
            f"{self.path}: the entries of row {row}, and maybe of others, are damaged or belong to another image file. "
            f"They are not used: pixels are right, but take longer. Build the index again: {self._of.make}"
        )
        return None

    def is_of(self, row: int, data: bytes | bytearray | memoryview) -> bool:
        """Return whether a row's entries, if it has any, belong to these bytes. Raises as `entries` does."""
        found = self._find(row)
        return found is None or found.is_of(data)

    def _find(self, row: int) -> ImageEntries | None:
        """Return the entries of a row, perhaps empty; None if the image was not scanned."""
        if not 0 <= row < self.rows:
            raise IndexError(f"row {row} is out of range for an index of {self.rows} rows: {self.path}")
        line = self._file.read(ROW.size, TABLE + row * ROW.size)
        if len(line) < ROW.size:
            raise _damaged(self.path, "it was truncated while it was open", self._of)
        offset, digest, size = ROW.unpack(line)
        if not size and not digest:
            return None
        # An index that is being learned may have grown since it was opened.
        inside = offset + size <= self._file.size or offset + size <= self._file.size_now()
        return ImageEntries(self._file.read(size, offset) if inside else b"", digest)


def whole_rows(manifest: Manifest) -> int:
    """Return the number of rows of the whole manifest, even for a view."""
    return sum(part.rows for part in manifest.parts)


def pack_header(fingerprint: str, rows: int, step: int, *, size: int = _GROWS) -> bytes:
    """Return the header; without `size`, the header of a file that grows."""
    body = _HEAD.pack(_MAGIC, _VERSION, step, rows, size, bytes.fromhex(fingerprint))
    return (body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))).ljust(TABLE, b"\0")


def _hash(data: bytes | bytearray | memoryview, entries: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data, seed=xxhash.xxh3_64_intdigest(entries))


def _entries_of(records: list[Record], step: int, storage: Storage | None) -> _Block:
    entries: list[tuple[int, ImageEntries]] = []
    errors: list[UnreadImage] = []
    nbytes = 0
    for record in records:
        try:
            data = read_bytes(record.path, storage=storage)
        except ImageError as error:
            errors.append(UnreadImage(record.row, record.path, str(error)))
            continue
        nbytes += len(data)
        found = compute_entries(data, step)
        if found is not None:
            entries.append((record.row, found))
    return _Block(entries, nbytes, errors)


def _nothing(images: int, errors: list[UnreadImage]) -> ImageError:
    """Return the error for a manifest without any entries."""
    if errors:
        return ImageError(
            f"no image has entries, so nothing is written; the first of {images:,} images that cannot be read: "
            f"{errors[0].message}"
        )
    return ImageError(
        f"none of {images:,} images has entries, so nothing is written: only baseline JPEGs without restart markers "
        "have entries"
    )


def _check_header(file: File, fingerprint: str, rows: int, of: Origin) -> tuple[int, int]:
    """Check an index and its fingerprint, and return step and size from its header."""
    head = file.read(TABLE, 0)
    body = head[: _HEAD.size]
    if len(head) < TABLE or _CHECKSUM.unpack_from(head, _HEAD.size)[0] != xxhash.xxh3_64_intdigest(body):
        raise _damaged(Path(file.path), "its header is invalid", of)
    magic, version, step, found_rows, size, found = _HEAD.unpack(body)
    if magic != _MAGIC or version != _VERSION:
        raise _damaged(Path(file.path), f"its version is not {_VERSION}", of)
    if size not in (_GROWS, file.size):
        raise _damaged(Path(file.path), f"it should have {size} bytes and has {file.size}", of)
    if found.hex() != fingerprint or found_rows != rows:
        raise StateError(
            f"{file.path!r} belongs to another {of.name} or an older version of it: it has {found_rows} rows and the "
            f"fingerprint {found.hex()}, the {of.name} {rows} rows and {fingerprint}; build it again with: {of.make}"
        )
    if file.size < TABLE + rows * ROW.size:
        raise _damaged(Path(file.path), "its table is truncated", of)
    return int(step), int(size)


def _damaged(path: Path, what: str, of: Origin) -> ManifestError:
    return ManifestError(
        f"{str(path)!r} is not an index of entries, or is damaged: {what}; build it again with: {of.make}"
    )
