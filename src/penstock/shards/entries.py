"""An index of entries for the images of a shard, beside it: ``NAME.tar.entries``.

    indexed = write_entries("train-000000.tar")                      # number of images with entries
    found = open_entries("train-000000.tar", index)
    entries = found.entries(number, data)                            # for `decode_region`; None if missing

The file has the format of `penstock.images.entries`: its rows are the samples of the shard, and its fingerprint is that
of the shard's content. A sample's entries belong to its first image, which `penstock.ImageDataset` decodes.

A damaged index, an index of another shard, and entries of other bytes are ignored with one warning. So an index never
changes pixels, and never ends a job.
"""

from __future__ import annotations

import errno
from pathlib import Path

from penstock.errors import ManifestError, ManifestIOError, StateError
from penstock.images import native
from penstock.images.entries import STEP, ImageIndex, IndexWriter, Origin, compute_entries
from penstock.images.sample_record import is_image
from penstock.shards.index import ShardIndex, load_or_build
from penstock.storage import write_atomically
from penstock.storage.files import SHARD, File
from penstock.warn_once import WarnOnce

__all__ = [
    "ORIGIN",
    "entries_path",
    "first_image",
    "has_entries",
    "open_entries",
    "open_if_valid",
    "write_entries",
]

SUFFIX = ".entries"
ORIGIN = Origin("shard", "penstock shards index --images SHARD")


def entries_path(shard: str) -> Path:
    """Return the path of a shard's index of entries."""
    return Path(shard + SUFFIX)


def write_entries(shard: str) -> int:
    """Write the entries of a local shard's images atomically; return the number of images with entries.

    Raises `ConfigError` without the C extension, `ShardIOError` if the shard cannot be read or the index not be
    written, and the errors of `load_or_build`.

    Cost: reads the images once, in two thirds of the time of decoding. Size: 3 % of the bytes of photographs.
    """
    native.require("an index of entries needs")
    index, file = load_or_build(shard), File(shard, SHARD)
    target = entries_path(shard)
    with SHARD.naming(target, "cannot write an index of entries to"), write_atomically(target) as out:
        writer = IndexWriter(out, len(index))
        for number in range(len(index)):
            data = first_image(index, file, number)
            if data is not None:
                writer.add(number, compute_entries(data))
        file.check()
        writer.finish(STEP, index.header.fingerprint)
    return writer.indexed


def first_image(index: ShardIndex, file: File, number: int) -> bytes | None:
    """Return the bytes of the first image of a sample; None if it has none."""
    for k in range(index.first[number], index.first[number + 1]):
        if is_image("." + index.extensions[index.extension[k]]):
            return file.read_exact(index.size[k], index.offset[k])
    return None


def open_entries(shard: str, index: ShardIndex, once: WarnOnce | None = None) -> ImageIndex:
    """Return the index of entries of a shard, given the shard's index.

    Raises `ManifestIOError` (missing), `ManifestError` (damaged), `StateError` (of another shard).
    """
    return ImageIndex(entries_path(shard), index.header.fingerprint, len(index), ORIGIN, once=once)


def has_entries(shard: str) -> bool:
    """Return whether a local shard has a valid index of entries."""
    try:
        open_entries(shard, load_or_build(shard))
    except (ManifestError, StateError):
        return False
    return True


def open_if_valid(shard: str, index: ShardIndex, once: WarnOnce) -> ImageIndex | None:
    """Return the index of entries of a shard; None if it has none, or, with a warning, none that is valid."""
    try:
        return open_entries(shard, index, once)
    except (ManifestError, StateError) as error:
        if not isinstance(error, ManifestIOError) or error.errno != errno.ENOENT:
            once.warn(f"{error}. Pixels are right without entries, but decoding takes longer")
        return None
