"""An index of entries: points where decoding of a manifest's JPEGs can begin. The file is ``train.txt.entries``.

A crop from the middle of a JPEG requires entropy decoding of all data before it. `write_index` scans each image once
and stores the result of `native.entries_of`. A crop is then decoded from the nearest entries on, to the same pixels:

    manifest = Manifest.open("train.txt", root="/data/imagenet")
    report = write_index(manifest)
    index = ImageIndex.open(report.path, manifest)
    entries = index.entries(row, data)      # for `decode_region(data, ..., entries=entries)`; None: no entries

Instead of `write_index`, ``find_index(manifest, learn=True)`` computes and stores missing entries while images are
decoded, for later epochs and other processes.

The file is a header, a table with a row per manifest row, and the entries (all little-endian):

    byte 0    magic, version, step, rows, file size, fingerprint     8s I I q q 16s   (size -1: the file grows)
    byte 48   xxh3_64 of the bytes before                            Q
    byte 64   per row: offset, hash, number of bytes                 Q Q I  (0 bytes: no entries; zeros: not scanned)

The hash is that of the image file's bytes, seeded with the hash of the entries. So damaged entries, and entries of
another file or of an older version of it, are detected at every use and never cause wrong pixels. The fingerprint is
the whole manifest's, so the index of another manifest is refused (`StateError`). The index of a tar shard has the same
format, with the fingerprint of the shard and a row per sample (`penstock.shards.entries`).

A file that grows begins as a header and a sparse table of zeros. The entries of an image are appended by one write,
and then its row is written, also for an image without entries. Any number of processes and threads may write at once,
without locks: the hash detects concurrent and truncated writes, and changed images, and their entries are learned
again. If the file cannot be read or written any more, a warning is issued and decoding continues without it.

Memory: `write_index` uses 20 bytes per row; an open index uses none and is read with two system calls per image.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import xxhash

from penstock.errors import ConfigError, ImageError, ManifestError, ManifestIOError, StateError
from penstock.images import native
from penstock.images.decode import read_bytes
from penstock.manifest import Manifest
from penstock.storage import File, io_error, is_remote, write_atomically
from penstock.storage.derived import count_growth, derived_path, load_or_write
from penstock.storage.files import MANIFEST
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
    "find_index",
    "index_path",
    "write_index",
]

MAX_ERRORS = 1000
"""The maximum number of unreadable images that a report lists."""
STEP = 8
"""The default distance of entries in MCUs."""
TABLE = 64
"""Offset of the table in bytes."""
ROW = struct.Struct("<QQI")
"""A row of the table: offset, hash, bytes."""
_MAGIC, _VERSION, _GROWS = b"PSENTRY\0", 1, -1
_HEAD = struct.Struct("<8sIIqq16sQ8x")
_BLOCK = 64  # rows per task: entries stay in memory until earlier blocks are written

Data: TypeAlias = bytes | bytearray | memoryview


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

    def is_of(self, data: Data) -> bool:
        """Return whether the entries belong to these image bytes."""
        return self.hash == _hash(data, self.entries)


def _hash(data: Data, entries: bytes) -> int:
    return xxhash.xxh3_64_intdigest(data, seed=xxhash.xxh3_64_intdigest(entries))


def compute_entries(data: Data, step: int = STEP) -> ImageEntries:
    """Compute the entries of an image file, which may have none. Cost: two thirds of a decode."""
    entries = native.entries_of(data, step=step) or b""
    return ImageEntries(entries, _hash(data, entries))


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


def _learned_place(manifest: Manifest) -> tuple[str, str | None]:
    """Return name and folder of a manifest's learned index; without a folder, it is in the user's cache."""
    root, name = manifest.root, manifest.whole_fingerprint
    if root is not None:  # the same list may refer to different images below another root
        place = root if is_remote(root) else os.path.abspath(root)
        name += f"-{xxhash.xxh3_64_hexdigest(os.fsencode(place))}"
    return name + ".entries", manifest.cache_dir


def _path_of(name: str, cache_dir: str | None) -> Path:
    with MANIFEST.naming(name, "there is no cache folder for"):
        return derived_path("entries", name) if cache_dir is None else Path(cache_dir) / name


def find_index(manifest: Manifest, *, learn: bool = False) -> ImageIndex:
    """Open the index of a manifest: the one beside it, else the learned one.

    With `learn` both are used, and unknown entries are learned. Then the index beside the manifest is ignored if it is
    damaged, with a warning, or belongs to an older version of the manifest.

    Raises `ManifestIOError` if there is no index, or if a learned one cannot be created, `ManifestError` for a damaged
    one, `StateError` for the index of another manifest, and `ConfigError` on systems without learning (Windows).
    """
    place = _learned_place(manifest)
    has_file = len(manifest.sources) == 1 and index_path(manifest).exists()
    if not learn:
        is_learned = not has_file and _path_of(*place).exists()
        return ImageIndex.open(_path_of(*place) if is_learned else index_path(manifest), manifest)
    complete = None
    try:
        with contextlib.suppress(StateError):
            complete = ImageIndex.open(index_path(manifest), manifest) if has_file else None
    except ManifestError as error:
        warnings.warn(f"{error}. Entries are learned instead", stacklevel=3)
    return ImageIndex.learn(*place, manifest.whole_fingerprint, _whole_rows(manifest), complete)


def _whole_rows(manifest: Manifest) -> int:
    """Return the number of rows of the whole manifest, even for a view."""
    return sum(part.rows for part in manifest.parts)


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

    Cost: the files are read once; two thirds of a decode per image. Size: with a step of 8, 3 % of photographs.
    """
    native.require("an index of entries needs")
    if not 1 <= step <= 65535:
        raise ConfigError(f"step must be from 1 to 65,535 MCUs, not {step}")
    target = index_path(manifest) if path is None else Path(path)
    with contextlib.suppress(OSError), target.open("rb") as existing:  # if it cannot be read, writing reports why
        if existing.read(len(_MAGIC)) not in (b"", _MAGIC):
            raise ConfigError(f"{target} exists and is not an index of entries: choose another path, or remove it")

    def scan(part: range) -> list[UnreadImage | tuple[int, int, ImageEntries]]:
        """Return (row, size, entries) of each image."""
        found: list[UnreadImage | tuple[int, int, ImageEntries]] = []
        for record in manifest.records(part):
            try:
                data = read_bytes(record.path, storage=manifest.storage)
                found.append((record.row, len(data), compute_entries(data, step)))
            except ImageError as error:
                found.append(UnreadImage(record.row, record.path, str(error)))
        return found

    images, nbytes, unread, errors = len(manifest), 0, 0, list[UnreadImage]()
    doing = "cannot write an index of entries (choose another path with path=, or --out on the command line) to"
    with MANIFEST.naming(target, doing), write_atomically(target) as file:
        writer = IndexWriter(file, _whole_rows(manifest))
        for found in map_blocks(scan, images, block=_BLOCK, workers=workers, progress=progress):
            for image in found:
                if isinstance(image, UnreadImage):
                    unread += 1
                    errors += [image] if len(errors) < MAX_ERRORS else []
                else:
                    row, size, entries = image
                    nbytes += size
                    writer.add(row, entries)
        if not writer.indexed:
            reason = "only baseline JPEGs of the usual samplings, without restart markers, have entries"
            if errors:
                reason = f"{unread:,} cannot be read, the first: {errors[0].message}"
            raise ImageError(f"none of {images:,} images has entries, so nothing is written: {reason}")
        writer.finish(step, manifest.whole_fingerprint)
    return IndexReport(target, images, writer.indexed, nbytes, unread, errors)


class IndexWriter:
    """Writes a complete index to a file: first the entries, then table and header at the start."""

    def __init__(self, file: BinaryIO, rows: int) -> None:
        self._file, self._rows, self._table = file, rows, bytearray(rows * ROW.size)
        self._end = TABLE + len(self._table)
        self.indexed = 0
        """Number of rows with entries."""
        file.seek(self._end)

    def add(self, row: int, found: ImageEntries) -> None:
        """Write the entries of a row's image, if it has any."""
        if found.entries:
            ROW.pack_into(self._table, row * ROW.size, self._end, found.hash, len(found.entries))
            self._end += self._file.write(found.entries)
            self.indexed += 1

    def finish(self, step: int, fingerprint: str) -> None:
        """Write header and table."""
        self._file.seek(0)
        self._file.write(_header(fingerprint, self._rows, step, self._end))
        self._file.write(self._table)


def _header(fingerprint: str, rows: int, step: int, size: int) -> bytes:
    fields = _MAGIC, _VERSION, step, rows, size, bytes.fromhex(fingerprint)
    return _HEAD.pack(*fields, xxhash.xxh3_64_intdigest(_HEAD.pack(*fields, 0)[:48]))


class ImageIndex:
    """An open index with the entries of a manifest's or a shard's images. It is complete, or it learns missing entries.

    Safe in threads and after a fork. A pickle contains only the path and the expected fingerprint. That of an index
    that learns contains its name, so it refers to the cache of the machine that loads it.
    """

    learns: bool = False
    """Whether missing entries are computed and stored: False once reading or writing failed."""
    _place: tuple[str, str | None] | None = None
    """Name of an index that learns, and its folder if not the user's cache."""
    _complete: ImageIndex | None = None
    """Of an index that learns: the one that is searched first."""

    def __init__(
        self, path: Path, fingerprint: str, rows: int, of: Origin = _MANIFEST, *, once: WarnOnce | None = None
    ) -> None:
        """Use `ImageIndex.open` or `find_index`. Indexes with the same `once` share one warning."""
        self.path, self.fingerprint, self.rows = path, fingerprint, rows
        self._of = of
        self._once = WarnOnce() if once is None else once
        try:
            self._file = File(str(path))
        except ManifestIOError as error:
            failed = ManifestIOError(f"no index of entries (build one with: {of.make}): {error}")
            failed.errno = error.errno
            raise failed from error
        head = self._file.read(TABLE, 0).ljust(TABLE)
        _, _, step, found_rows, size, found, _ = _HEAD.unpack(head)
        if head != _header(found.hex(), found_rows, step, size):
            raise self._damaged(f"its header is invalid, or its version is not {_VERSION}")
        if size not in (_GROWS, self._file.size):
            raise self._damaged(f"it should have {size} bytes and has {self._file.size}")
        if found.hex() != fingerprint or found_rows != rows:
            raise StateError(
                f"{str(path)!r} belongs to another {of.name} or an older version of it: it has {found_rows} rows and "
                f"the fingerprint {found.hex()}, the {of.name} {rows} rows and {fingerprint}; build it again with: "
                f"{of.make}"
            )
        if self._file.size < TABLE + rows * ROW.size:
            raise self._damaged("its table is truncated")
        self.step: int = step
        """Distance of entries in MCUs."""

    @classmethod
    def open(cls, path: str | os.PathLike[str], manifest: Manifest) -> ImageIndex:
        """Open the index at `path`, which must belong to the current content of `manifest`, or of its whole if a view.

        Raises `ManifestIOError` (missing), `ManifestError` (another kind of file, or damaged), `StateError` (another
        manifest).
        """
        return cls(Path(path), manifest.whole_fingerprint, _whole_rows(manifest))

    @classmethod
    def learn(
        cls, name: str, cache_dir: str | None, fingerprint: str, rows: int, complete: ImageIndex | None = None
    ) -> ImageIndex:
        """Open the index called `name` in the user's cache or in `cache_dir`, or create it, to add missing entries.

        The index `complete` is searched first. Without the C extension nothing is learned. Raises `ConfigError` on
        Windows, `ManifestIOError` if the file cannot be read or created.
        """
        if not hasattr(os, "pwrite"):
            raise ConfigError("entries cannot be learned on this system: build an index with penstock images index")
        path = _path_of(name, cache_dir)

        def load(path: Path) -> ImageIndex | None:
            try:
                return cls(path, fingerprint, rows)
            except (ManifestError, StateError):
                return None

        def write(file: BinaryIO) -> None:
            file.write(_header(fingerprint, rows, STEP, _GROWS))
            file.truncate(TABLE + rows * ROW.size)  # a hole, which takes no disk space

        with MANIFEST.naming(path, "cannot write an index of entries to"):
            index = load_or_write([path], load, write)
        index._place, index._complete, index.learns = (name, cache_dir), complete, True
        try:
            index._write(b"", TABLE)
        except OSError as error:
            index._stop(str(io_error(path, error, "cannot keep entries in")))
        return index

    def __len__(self) -> int:
        return self.rows

    def __reduce__(self) -> tuple[Any, ...]:
        if self._place is None:
            return ImageIndex, (self.path, self.fingerprint, self.rows, self._of)
        return ImageIndex.learn, (*self._place, self.fingerprint, self.rows, self._complete)

    def __repr__(self) -> str:
        return f"ImageIndex({str(self.path)!r})"

    def entries(self, row: int, data: Data) -> bytes | None:
        """Return the entries of an image for `decode_region`; None if it has none.

        `data` is the whole image file. `row` is the row in the whole manifest (`Record.row`), or the number of the
        sample in the shard. Entries of other bytes are not returned: if the index learns, they are computed anew, else
        a warning is issued once per process, as for an index that was truncated meanwhile. Raises `IndexError` for a
        row out of range.

        Cost: two reads from the page cache, and a hash of `data`: 15 us for 100 kB. Learning: two thirds of a decode,
        once per image.
        """
        if bytes(data[:2]) != b"\xff\xd8":
            return None  # other formats have no entries
        searched = [self] if self._complete is None else [self._complete, self]
        for index in searched:
            try:
                found = index._find(row)
            except ManifestError as error:  # it was truncated
                self._stop(str(error))
                continue
            if found is not None and found.is_of(data):
                return found.entries or None
            if found is not None and not self.learns:
                self._stop(
                    f"{index.path}: the entries of row {row}, and maybe of others, are damaged or belong to another "
                    f"image file: build the index again with: {index._of.make}"
                )
        return self._learn(row, data) if self.learns and native.is_available() else None

    def is_of(self, row: int, data: Data) -> bool:
        """Return whether a row's entries, if it has any, belong to these bytes.

        Raises `IndexError` for a row out of range, `ManifestError` if the index was truncated meanwhile.
        """
        found = self._find(row)
        return found is None or found.is_of(data)

    def _find(self, row: int) -> ImageEntries | None:
        """Return the entries of a row, perhaps empty; None if the image was not scanned."""
        if not 0 <= row < self.rows:
            raise IndexError(f"row {row} is out of range for an index of {self.rows} rows: {self.path}")
        line = self._file.read(ROW.size, TABLE + row * ROW.size)
        if len(line) < ROW.size:
            raise self._damaged("it was truncated while it was open")
        offset, digest, size = ROW.unpack(line)
        if not size and not digest:
            return None
        # An index that is being learned may have grown since it was opened.
        inside = offset + size <= self._file.size or offset + size <= self._file.size_now()
        return ImageEntries(self._file.read(size, offset) if inside else b"", digest)

    def _learn(self, row: int, data: Data) -> bytes | None:
        """Compute the entries of an image. Append them, then write the row, also of an image without entries."""
        found = compute_entries(data, self.step)
        size, offset = len(found.entries), 0
        try:
            if size:
                offset = self._write(found.entries) - size
            self._write(ROW.pack(offset, found.hash, size), TABLE + row * ROW.size)
            if not count_growth(self.path, size):
                self._stop(
                    f"{self.path}: no more entries are stored: the cached files exceed half of the free disk space"
                )
        except OSError as error:
            self._stop(str(io_error(self.path, error, "cannot keep entries in")))
        return found.entries or None

    def _write(self, data: bytes, position: int | None = None) -> int:
        """Write bytes at a position, or append them; return the position after them."""
        # With O_APPEND, Linux ignores the offset of pwrite.
        flags = os.O_WRONLY | getattr(os, "O_CLOEXEC", 0) | (os.O_APPEND if position is None else 0)
        # With a descriptor of its own, the position after a write is the end of this write, even if others append.
        descriptor = os.open(self.path, flags)
        try:
            if not self._file.is_same(descriptor):
                raise OSError(errno.ESTALE, "it was replaced")
            count = os.write(descriptor, data) if position is None else os.pwrite(descriptor, data, position)
            if count < len(data):
                raise OSError(errno.ENOSPC, "the disk is full")
            return os.lseek(descriptor, 0, os.SEEK_CUR)
        finally:
            os.close(descriptor)

    def _stop(self, why: str) -> None:
        self.learns = False
        self._once.warn(f"{why}. Pixels are right without entries, but decoding takes longer")

    def _damaged(self, what: str) -> ManifestError:
        return ManifestError(
            f"{str(self.path)!r} is not an index of entries, or is damaged: {what}; build it again with: "
            f"{self._of.make}"
        )
