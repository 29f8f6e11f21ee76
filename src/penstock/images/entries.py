"""An index of entries: where the coded data of each image of a manifest can be begun, beside it: ``train.txt.entries``.

A crop out of the middle of a JPEG costs a walk over all that is coded before it. `write_index` walks over each image
once and keeps what `native.entries_of` says. A crop is then decoded from the nearest entries on, to the same pixels:

    manifest = Manifest.open("train.txt", root="/data/imagenet")
    report = write_index(manifest)
    index = ImageIndex.open(report.path, manifest)
    entries = index.entries(row, data)      # bytes for `decode_region(data, ..., entries=entries)`; None: it has none

The file is a header, a row of the table for each row of the manifest, and the entries (all little-endian):

    byte 0    magic, version, step, rows, size of the file, fingerprint     8s I I q q 16s   (size -1: it grows)
    byte 48   xxh3_64 of the bytes before                                   Q
    byte 64   of each row: offset, hash, bytes                              Q Q I  (0 bytes: it has no entries)

The hash is that of the image file's bytes, seeded with that of the entries. So entries of another file, of an older
version of it, and damaged ones are noticed at every use, and never give wrong pixels. The fingerprint is that of the
whole manifest, so an index of another one is refused (`StateError`). That of a tar shard is the same file, with the
fingerprint of the shard and a row for each sample (`penstock.shards.entries`). `penstock.images.learning` makes such a
file while images are decoded.

Memory: `write_index` holds 20 bytes a row; an open index holds none, and is read by two system calls an image.
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
from penstock.images.threads import map_blocks
from penstock.images.warn_once import Once
from penstock.manifest import Manifest, Record
from penstock.storage import SourceFile, Storage, io_error, write_atomically

__all__ = [
    "MAX_ERRORS",
    "ROW",
    "STEP",
    "TABLE",
    "Found",
    "ImageIndex",
    "IndexReport",
    "IndexWriter",
    "Origin",
    "UnreadImage",
    "find_entries",
    "index_path",
    "pack_header",
    "whole_rows",
    "write_index",
]

MAX_ERRORS = 1000
"""Of the images that could not be read, listed one by one."""
STEP = 8
"""MCUs from one entry to the next, unless another number is given."""
_BLOCK = 64  # rows per task: their entries wait in memory for those before them
_MAGIC, _VERSION = b"PSENTRY\0", 1
_HEAD = struct.Struct("<8sIIqq16s")
_CHECKSUM = struct.Struct("<Q")
TABLE = 64
"""Where it begins."""
ROW = struct.Struct("<QQI")
"""Of the table: offset, hash, bytes. Zeros: nothing is known; a hash without bytes: there are no entries."""
_GROWS = -1  # instead of a size
_ROWS = np.dtype([("offset", "<u8"), ("hash", "<u8"), ("bytes", "<u4")])


class Origin(NamedTuple):
    """What has the images of an index, and the command that makes one, for messages."""

    name: str
    make: str


_MANIFEST = Origin("manifest", "penstock images index FILE")


class UnreadImage(NamedTuple):
    """An image that could not be read: its row, its path and why."""

    row: int
    path: str
    message: str


class IndexReport(NamedTuple):
    """What `write_index` has done."""

    path: Path
    """Of the index."""
    images: int
    indexed: int
    """Images that have entries."""
    nbytes: int
    """Of the images."""
    unread: int
    """Images that could not be read."""
    errors: list[UnreadImage]
    """The first `MAX_ERRORS` of these, by row."""


class Found(NamedTuple):
    """The entries of an image, none if they are empty, and their hash with its bytes."""

    entries: bytes
    hash: int

    @classmethod
    def of(cls, data: bytes | bytearray | memoryview, entries: bytes) -> Found:
        """These entries of these bytes."""
        return cls(entries, _hash(data, entries))

    def is_of(self, data: bytes | bytearray | memoryview) -> bool:
        """Whether they were made of these bytes."""
        return _hash(data, self.entries) == self.hash


class _Block(NamedTuple):
    """Of some images, one after the other."""

    entries: list[tuple[int, Found]]
    """Of each row that has some."""
    nbytes: int
    errors: list[UnreadImage]


def find_entries(data: bytes | bytearray | memoryview, step: int = STEP) -> Found | None:
    """What an index keeps of an image file; None where it has no entries. Cost: two fifths of a decode."""
    entries = native.entries_of(data, step=step)
    return None if entries is None else Found.of(data, entries)


def index_path(manifest: Manifest) -> Path:
    """Where the index of `manifest` belongs: beside its file.

    Raises `ConfigError` for a manifest of several files or of a server: such a place has to be said.
    """
    if len(manifest.sources) != 1:
        what = f"of {len(manifest.sources)} files" if manifest.sources else "of a server"
        raise ConfigError(
            f"a manifest {what} has no one place for its index of entries: name a file (--out of penstock images "
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

    There is an entry every `step` MCUs (8 or 16 pixels each) of a row of them. `workers` threads (default: 4 per CPU,
    at most 32) read the files; `progress` is called now and then with the number of rows done and of all rows. Of a
    view only its rows get entries. Images that have none are left out, so are those that cannot be read, which the
    report names.

    Raises `ConfigError` without the C extension, for a step outside 1 to 65,535, and for a `path` of a file that is no
    index, which stays; `ImageError` where no image has entries, `ManifestError` for lines that do not parse,
    `ManifestIOError` when the place cannot be written.

    Cost: the files are read once; two fifths of a decode each. With a step of 8, 3 % of the bytes of photographs.
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
    except ManifestIOError:  # of the manifest itself
        raise
    except OSError as error:
        doing = "cannot write an index of entries (choose another place with path=, or --out on the command line) to"
        raise io_error(target, error, doing) from error
    return IndexReport(target, images, writer.indexed, nbytes, unread, errors)


def _check_target(path: Path) -> None:
    """Refuse to write over what is no index: a manifest, by a slip of the pen."""
    try:
        with path.open("rb") as file:
            found = file.read(len(_MAGIC))
    except OSError:
        return  # there is none, or writing will say what is wrong
    if found not in (b"", _MAGIC):
        raise ConfigError(f"{path} exists, and is no index of entries: choose another place for one, or remove it")


class IndexWriter:
    """An index on its way into a file: entries as they come, then the table and the header before them."""

    def __init__(self, file: BinaryIO, rows: int) -> None:
        self._file, self._table = file, np.zeros(rows, _ROWS)
        self._end = TABLE + self._table.nbytes
        self.indexed = 0
        """Rows that have entries."""
        file.seek(self._end)

    def add(self, row: int, found: Found) -> None:
        """Write the entries of a row's image."""
        self._table[row] = self._end, found.hash, len(found.entries)
        self._end += self._file.write(found.entries)
        self.indexed += 1

    def finish(self, step: int, fingerprint: str) -> None:
        """Write what comes before the entries."""
        self._file.seek(0)
        self._file.write(pack_header(fingerprint, len(self._table), step, size=self._end))
        self._file.write(self._table.tobytes())


class ImageIndex:
    """The entries of the images of a manifest, or of a shard, in a file that is open.

    Safe in several threads and after a fork. Picklable: the path and the expected fingerprint travel.
    """

    def __init__(
        self, path: Path, fingerprint: str, rows: int, of: Origin = _MANIFEST, *, once: Once | None = None
    ) -> None:
        """Use `ImageIndex.open`. Indexes with the same `once` warn once together."""
        self.path = path
        self.fingerprint = fingerprint
        """Of the whole manifest, or the shard, whose images these are."""
        self.rows = rows
        self._of = of
        try:
            self._file = SourceFile(str(path))
        except ManifestIOError as error:
            failed = ManifestIOError(f"no index of entries (make one with: {of.make}): {error}")
            failed.errno = error.errno
            raise failed from error
        self.step, size = _check_header(self._file, fingerprint, rows, of)
        """MCUs from one entry to the next."""
        self.grows = size == _GROWS
        """Whether entries are learned and written into it; see `penstock.images.learning`."""
        self._once = Once() if once is None else once

    @classmethod
    def open(cls, path: str | os.PathLike[str], manifest: Manifest) -> ImageIndex:
        """The index in `path`, which must have been made of the content that `manifest`, or what it is a view of, has.

        Raises `ManifestIOError` (missing), `ManifestError` (another kind of file, or a damaged one), `StateError`
        (another manifest).
        """
        return cls(Path(path), manifest.whole_fingerprint, whole_rows(manifest))

    def __len__(self) -> int:
        return self.rows

    def __reduce__(self) -> tuple[type[ImageIndex], tuple[Path, str, int, Origin]]:
        return ImageIndex, (self.path, self.fingerprint, self.rows, self._of)

    def __repr__(self) -> str:
        return f"ImageIndex({str(self.path)!r})"

    def entries(self, row: int, data: bytes | bytearray | memoryview) -> bytes | None:
        """The entries of an image, whose whole file is `data`, for `decode_region`; None if it has none.

        `row` is that of the whole manifest (`Record.row`), or the number of the sample in the shard. Entries that were
        made of other bytes are not returned; there is a warning, once in a process.

        Raises `IndexError` for a row that there is not, `ManifestError` where the file was truncated meanwhile.

        Cost: two reads from the page cache, and a hash of `data`: 15 us for 100 kB.
        """
        found = self._find(row)
        if found is None or found.is_of(data):
            return (found and found.entries) or None
        self._once.warn(
            f"{self.path}: the entries of row {row}, and maybe of others, are damaged or those of another image file. "
            f"They are not used: pixels are right, but take longer. Make the index again: {self._of.make}"
        )
        return None

    def is_of(self, row: int, data: bytes | bytearray | memoryview) -> bool:
        """Whether a row's entries, if it has any, were made of these bytes. Raises as `entries` does."""
        found = self._find(row)
        return found is None or found.is_of(data)

    def _find(self, row: int) -> Found | None:
        """What is known of a row: its entries, or that it has none."""
        if not 0 <= row < self.rows:
            raise IndexError(f"row {row} is out of range for an index of {self.rows} rows: {self.path}")
        line = self._file.read(ROW.size, TABLE + row * ROW.size)
        if len(line) < ROW.size:
            raise _damaged(self.path, "it was truncated while it was open", self._of)
        offset, digest, size = ROW.unpack(line)
        if not size and not digest:
            return None
        # One that is learned has grown since it was opened.
        inside = offset + size <= self._file.size or offset + size <= self._file.size_now()
        return Found(self._file.read(size, offset) if inside else b"", digest)


def whole_rows(manifest: Manifest) -> int:
    """The rows of what it is a view of."""
    return sum(part.rows for part in manifest.parts)


def pack_header(fingerprint: str, rows: int, step: int, *, size: int = _GROWS) -> bytes:
    """What comes before the table; without a `size` that of a file that grows."""
    body = _HEAD.pack(_MAGIC, _VERSION, step, rows, size, bytes.fromhex(fingerprint))
    return (body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))).ljust(TABLE, b"\0")


def _hash(data: bytes | bytearray | memoryview, entries: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data, seed=xxhash.xxh3_64_intdigest(entries))


def _entries_of(records: list[Record], step: int, storage: Storage | None) -> _Block:
    entries: list[tuple[int, Found]] = []
    errors: list[UnreadImage] = []
    nbytes = 0
    for record in records:
        try:
            data = read_bytes(record.path, storage=storage)
        except ImageError as error:
            errors.append(UnreadImage(record.row, record.path, str(error)))
            continue
        nbytes += len(data)
        found = find_entries(data, step)
        if found is not None:
            entries.append((record.row, found))
    return _Block(entries, nbytes, errors)


def _nothing(images: int, errors: list[UnreadImage]) -> ImageError:
    """The error for images of which none has entries."""
    if errors:
        return ImageError(
            f"no image has entries, so nothing is written; the first of {images:,} that cannot be read: "
            f"{errors[0].message}"
        )
    return ImageError(
        f"none of {images:,} images has entries, so nothing is written: only baseline JPEGs without restart markers "
        "have any"
    )


def _check_header(file: SourceFile, fingerprint: str, rows: int, of: Origin) -> tuple[int, int]:
    """Step and size of an index that is sound and that of images with this fingerprint."""
    head = file.read(TABLE, 0)
    body = head[: _HEAD.size]
    if len(head) < TABLE or _CHECKSUM.unpack_from(head, _HEAD.size)[0] != xxhash.xxh3_64_intdigest(body):
        raise _damaged(Path(file.path), "its header is not that of one", of)
    magic, version, step, found_rows, size, found = _HEAD.unpack(body)
    if magic != _MAGIC or version != _VERSION:
        raise _damaged(Path(file.path), f"it is of another version than {_VERSION}", of)
    if size not in (_GROWS, file.size):
        raise _damaged(Path(file.path), f"it should have {size} bytes and has {file.size}", of)
    if found.hex() != fingerprint or found_rows != rows:
        raise StateError(
            f"{file.path!r} belongs to another {of.name} or an older version of it: it has {found_rows} rows and the "
            f"fingerprint {found.hex()}, the {of.name} {rows} rows and {fingerprint}; make it again with: {of.make}"
        )
    if file.size < TABLE + rows * ROW.size:
        raise _damaged(Path(file.path), "its table is cut off", of)
    return int(step), int(size)


def _damaged(path: Path, what: str, of: Origin) -> ManifestError:
    return ManifestError(
        f"{str(path)!r} is no index of entries, or a damaged one: {what}; make it again with: {of.make}"
    )
