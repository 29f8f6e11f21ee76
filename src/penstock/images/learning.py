"""An index of entries that is learned while images are decoded, and kept for later epochs and for everybody else.

    index = find_index(manifest, learn=True)        # what `ImageDataset(index="learn")` does
    entries = index.entries(row, data)              # known ones; else they are made now, and kept

The file is one of `penstock.images.entries` that grows. It begins as a header and a sparse table of zeros. Whoever
meets an image without a row appends its entries, by one write, and then writes its row; that of an image without any
says so. It is named by the fingerprint of the whole manifest and the folder of its images, and lies in the user's cache
or the manifest's ``cache_dir``. What an index that was made already knows is not learned.

Promises: any number of processes and threads write at once, and nothing is locked meanwhile. A process that is killed
loses the entries of one image. What two write at once, or a kill cuts off, the hash of the row tells, and it is learned
anew; so is a file that was changed. Where nothing more can be read or written, a warning says so, and decoding goes on
as ever. Entries of a file that was changed stay where they are: only a new index is smaller.

Memory: none. An image is known to all processes as soon as its row is written, whoever wrote it.
"""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

from penstock.errors import ConfigError, ManifestError, PenstockError, StateError
from penstock.images import native
from penstock.images.entries import (
    ROW,
    STEP,
    TABLE,
    Found,
    ImageIndex,
    find_entries,
    index_path,
    pack_header,
    whole_rows,
)
from penstock.manifest import Manifest
from penstock.storage import file_lock, grown, io_error, is_remote, kept_path, write_kept

__all__ = ["LearnedIndex", "find_index", "learned_path"]

_NOT_INHERITED = getattr(os, "O_CLOEXEC", 0)


def find_index(manifest: Manifest, *, learn: bool = False) -> ImageIndex:
    """The index of a manifest: that which was made, beside it, else that which was learned.

    With `learn` both are used, and what neither knows is learned. One that was made and is damaged, or of an older
    version of the manifest, is then left out; a warning names a damaged one.

    Raises `ManifestIOError` where there is none, or where one to be learned cannot be begun, `ManifestError` for a
    damaged one, `StateError` for that of another manifest, and `ConfigError` where nothing can be learned (Windows).
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
    """Where the index of a manifest is learned.

    Raises `ManifestIOError` where there is no cache folder at all.
    """
    return _place(_name(manifest), manifest.cache_dir)


def _name(manifest: Manifest) -> str:
    root, name = manifest.root, manifest.whole_fingerprint
    if root is not None:
        # The same list may be that of other images.
        place = root if is_remote(root) else os.path.abspath(root)
        name += f"-{xxhash.xxh3_64_hexdigest(os.fsencode(place))}"
    return name + ".entries"


def _place(name: str, cache_dir: str | None) -> Path:
    if cache_dir is not None:
        return Path(cache_dir) / name
    try:
        return kept_path("entries", name)
    except PenstockError:
        raise
    except OSError as error:
        raise io_error(name, error, "there is no cache folder for") from error


class LearnedIndex(ImageIndex):
    """An `ImageIndex` that learns what it does not know; opened, or begun, in the cache of this machine.

    Safe in several threads and after a fork. Picklable: its name travels, so on another machine it is that one's.
    Without the C extension it learns nothing.
    """

    def __init__(
        self, fingerprint: str, rows: int, name: str, cache_dir: str | None, made: ImageIndex | None = None
    ) -> None:
        """Use `find_index`. What is `made` is used first."""
        if not hasattr(os, "pwrite"):
            raise ConfigError("entries cannot be learned on this system: make an index with penstock images index")
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
        """Whether entries are still kept: not where nothing more can be written."""
        try:
            with self._opened():
                pass  # it can be written to
        except OSError as error:
            self._stop(str(io_error(path, error, "cannot keep entries in")))

    def __reduce__(self) -> tuple[Any, ...]:
        return LearnedIndex, (self.fingerprint, self.rows, self._name, self._cache_dir, self._made)

    def __repr__(self) -> str:
        return f"LearnedIndex({str(self.path)!r})"

    def entries(self, row: int, data: bytes | bytearray | memoryview) -> bytes | None:
        """The entries of an image, as those of an `ImageIndex`; made now if they are not known of these bytes.

        Cost: where they are made two fifths of a decode, once for each image.
        """
        if bytes(data[:2]) != b"\xff\xd8":
            return None  # no JPEG: neither are there any, nor has anybody to remember that
        found = self._known(row, data)
        if found is None:
            if not self.keeps or not native.is_available():
                return None
            found = find_entries(data, self.step) or Found.of(data, b"")
            try:
                self._keep(row, found)
            except OSError as error:
                self._stop(str(io_error(self.path, error, "cannot keep entries in")))
        return found.entries or None

    def _known(self, row: int, data: bytes | bytearray | memoryview) -> Found | None:
        for index in (self._made, self):
            try:
                found = None if index is None else index._find(row)
            except ManifestError as error:  # somebody has cut it off
                self._stop(str(error))
                continue
            if found is not None and found.is_of(data):
                return found
        return None

    def _keep(self, row: int, found: Found) -> None:
        """Append the entries of an image, then write its row: without any, that it has none."""
        offset, entries = 0, found.entries
        if entries:
            # A descriptor of its own: behind a write its place is the end of that, whoever else appends.
            with self._opened(os.O_APPEND) as file:
                _written(os.write(file, entries), entries)
                offset = os.lseek(file, 0, os.SEEK_CUR) - len(entries)
        line = ROW.pack(offset, found.hash, len(entries))
        with self._opened() as file:  # where O_APPEND is set, Linux appends whatever place is said
            _written(os.pwrite(file, line, TABLE + row * ROW.size), line)
        if not grown(self.path, len(entries)):
            self._stop(f"{self.path}: no more entries are kept: what is kept exceeds half of what the disk has free")

    @contextmanager
    def _opened(self, flags: int = 0) -> Iterator[int]:
        """The file, to be written to."""
        descriptor = os.open(self.path, os.O_WRONLY | _NOT_INHERITED | flags)
        try:
            if not self._file.is_same(descriptor):
                raise OSError(errno.ESTALE, "it was replaced")
            yield descriptor
        finally:
            os.close(descriptor)

    def _stop(self, why: str) -> None:
        self.keeps = False
        self._once.warn(f"{why}. Images without entries are decoded to the same pixels, in more time")


def _written(count: int, data: bytes) -> None:
    if count < len(data):
        raise OSError(errno.ENOSPC, "the disk is full")


def _begin(path: Path, fingerprint: str, rows: int) -> None:
    """Make an index without entries, unless there is a sound one. One process does; the others wait for it."""
    if _is_sound(path, fingerprint, rows):
        return
    with file_lock(path):
        if _is_sound(path, fingerprint, rows):
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with write_kept(path) as file:
            file.write(pack_header(fingerprint, rows, STEP))
            file.truncate(TABLE + rows * ROW.size)  # a hole, which takes no space


def _is_sound(path: Path, fingerprint: str, rows: int) -> bool:
    try:
        ImageIndex(path, fingerprint, rows)
    except (ManifestError, StateError):
        return False
    return True
