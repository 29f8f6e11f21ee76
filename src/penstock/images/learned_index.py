"""An index of entries that is built while images are decoded, for later epochs and other processes.

    index = find_index(manifest, learn=True)        # as in `ImageDataset(index="learn")`
    entries = index.entries(row, data)              # known entries; others are computed and stored

The file has the format of `penstock.images.entries` and grows. It begins as a header and a sparse table of zeros. When
an image without a row is decoded, its entries are appended by one write, and then its row is written, also for an image
without entries. The file's name contains the fingerprint of the whole manifest and a hash of the images' folder. It is
in the user's cache or the manifest's ``cache_dir``. Entries that an existing index contains are not learned.

Promises: any number of processes and threads may write concurrently, without locks. A killed process loses the entries
of one image. The row's hash detects concurrent or truncated writes and changed image files, and their entries are
learned again. If the index cannot be read or written any more, a warning is issued and decoding continues without it.
Entries of changed files are not removed: only a new index is smaller.

Memory: none. All processes see the entries of an image as soon as its row is written.
"""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from penstock.errors import ConfigError, ManifestError, PenstockError, StateError
from penstock.images import native
from penstock.images.entries import (
    ROW,
    STEP,
    TABLE,
    ImageEntries,
    ImageIndex,
    compute_entries,
    index_path,
    pack_header,
    whole_rows,
)
from penstock.manifest import Manifest
from penstock.storage import io_error, is_remote
from penstock.storage.derived import count_growth, derived_path, load_or_write

__all__ = ["LearnedIndex", "find_index", "learned_path"]

_NOT_INHERITED = getattr(os, "O_CLOEXEC", 0)


def find_index(manifest: Manifest, *, learn: bool = False) -> ImageIndex:
    """Open the index of a manifest: the one beside it, else the learned one.

    With `learn` both are used, and unknown entries are learned. Then the index beside the manifest is ignored if it is
    damaged, with a warning, or belongs to an older version of the manifest.

    Raises `ManifestIOError` if there is no index, or if a learned one cannot be created, `ManifestError` for a damaged
    one, `StateError` for the index of another manifest, and `ConfigError` on systems without learning (Windows).
    """
    if learn:
        place = _name(manifest), manifest.cache_dir
        return LearnedIndex(manifest.whole_fingerprint, whole_rows(manifest), *place, _made(manifest))
    made = index_path(manifest) if len(manifest.sources) == 1 else None
    learned = learned_path(manifest)
    if made is not None and (made.exists() or not learned.exists()):
        return ImageIndex.open(made, manifest)
    return ImageIndex.open(learned if learned.exists() else index_path(manifest), manifest)


def _made(manifest: Manifest) -> ImageIndex | None:
    if len(manifest.sources) != 1 or not (path := index_path(manifest)).exists():
        return None
    try:
        return ImageIndex.open(path, manifest)
    except StateError:
        return None
    except ManifestError as error:
        warnings.warn(f"{error}. Entries are learned instead", stacklevel=4)
        return None


def learned_path(manifest: Manifest) -> Path:
    """Return the path of a manifest's learned index.

    Raises `ManifestIOError` if there is no cache folder.
    """
    return _place(_name(manifest), manifest.cache_dir)


def _name(manifest: Manifest) -> str:
    root, name = manifest.root, manifest.whole_fingerprint
    if root is not None:
        # The same list may refer to different images below another root.
        place = root if is_remote(root) else os.path.abspath(root)
        name += f"-{xxhash.xxh3_64_hexdigest(os.fsencode(place))}"
    return name + ".entries"


def _place(name: str, cache_dir: str | None) -> Path:
    if cache_dir is not None:
        return Path(cache_dir) / name
    try:
        return derived_path("entries", name)
    except PenstockError:
        raise
    except OSError as error:
        raise io_error(name, error, "there is no cache folder for") from error


class LearnedIndex(ImageIndex):
    """An `ImageIndex` that computes and stores missing entries. It is opened or created in this machine's cache.

    Safe in threads and after a fork. A pickle contains its name, so it refers to the cache of the machine that loads
    it. Without the C extension it learns nothing.
    """

    def __init__(
        self, fingerprint: str, rows: int, name: str, cache_dir: str | None, made: ImageIndex | None = None
    ) -> None:
        """Use `find_index`. The index `made` is searched first."""
        if not hasattr(os, "pwrite"):
            raise ConfigError("entries cannot be learned on this system: build an index with penstock images index")
        path = _place(name, cache_dir)
        try:
            _begin(path, fingerprint, rows)
            super().__init__(path, fingerprint, rows)
        except PenstockError:
            raise
        except OSError as error:
            raise io_error(path, error, "cannot write an index of entries to") from error
        self._name, self._cache_dir, self._made = name, cache_dir, made
        self.keeps = True
        """Whether new entries are stored: False once writing failed."""
        try:
            with self._opened():
                pass  # the file is writable
        except OSError as error:
            self._stop(str(io_error(path, error, "cannot keep entries in")))

    def __reduce__(self) -> tuple[Any, ...]:
        return LearnedIndex, (self.fingerprint, self.rows, self._name, self._cache_dir, self._made)

    def __repr__(self) -> str:
        return f"LearnedIndex({str(self.path)!r})"

    def entries(self, row: int, data: bytes | bytearray | memoryview) -> bytes | None:
        """Return the entries of an image, as `ImageIndex.entries` does; compute and store them if they are missing.

        Cost: two fifths of a decode, once per image.
        """
        if bytes(data[:2]) != b"\xff\xd8":
            return None  # other formats have no entries, and no row is needed for that
        found = self._known(row, data)
        if found is None:
            if not self.keeps or not native.is_available():
                return None
            found = compute_entries(data, self.step) or ImageEntries.of(data, b"")
            try:
                self._keep(row, found)
            except OSError as error:
                self._stop(str(io_error(self.path, error, "cannot keep entries in")))
        return found.entries or None

    def _known(self, row: int, data: bytes | bytearray | memoryview) -> ImageEntries | None:
        for index in (self._made, self):
            try:
                found = None if index is None else index._find(row)
            except ManifestError as error:  # it was truncated
                self._stop(str(error))
                continue
            if found is not None and found.is_of(data):
                return found
        return None

    def _keep(self, row: int, found: ImageEntries) -> None:
        """Append the entries of an image, then write its row, also if it has no entries."""
        offset, entries = 0, found.entries
        if entries:
            # With a separate descriptor, the position after a write is the end of this write, even if others append.
            with self._opened(os.O_APPEND) as file:
                _written(os.write(file, entries), entries)
                offset = os.lseek(file, 0, os.SEEK_CUR) - len(entries)
        line = ROW.pack(offset, found.hash, len(entries))
        # Without O_APPEND: with it, Linux ignores the offset of pwrite.
        with self._opened() as file:
            _written(os.pwrite(file, line, TABLE + row * ROW.size), line)
        if not count_growth(self.path, len(entries)):
            self._stop(f"{self.path}: no more entries are stored: the cached files exceed half of the free disk space")

    @contextmanager
    def _opened(self, flags: int = 0) -> Iterator[int]:
        """Open the file for writing."""
        descriptor = os.open(self.path, os.O_WRONLY | _NOT_INHERITED | flags)
        try:
            if not self._file.is_same(descriptor):
                raise OSError(errno.ESTALE, "it was replaced")
            yield descriptor
        finally:
            os.close(descriptor)

    def _stop(self, why: str) -> None:
        self.keeps = False
        self._once.warn(f"{why}. Images without entries decode to the same pixels, but take longer")


def _written(count: int, data: bytes) -> None:
    if count < len(data):
        raise OSError(errno.ENOSPC, "the disk is full")


def _begin(path: Path, fingerprint: str, rows: int) -> None:
    """Create an index without entries, unless a valid one exists. One process creates it; others wait."""

    def load(path: Path) -> ImageIndex | None:
        try:
            return ImageIndex(path, fingerprint, rows)
        except (ManifestError, StateError):
            return None

    def write(file: BinaryIO) -> None:
        file.write(pack_header(fingerprint, rows, STEP))
        file.truncate(TABLE + rows * ROW.size)  # a hole, which takes no disk space

    load_or_write([path], load, write)
