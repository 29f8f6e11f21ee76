"""`MDSFolder`: the samples of an MDS dataset by number, without an order of its own.

    folder = MDSFolder("data/imagenet-mds", split="train")
    folder[0], folder[-1]                        the first and the last sample: dicts of columns
    folder.records([5, 3, 5])                    several samples, in this order; each shard is read in one pass

It is map-style, so any sampler works with it; `MDSDataset` adds an order, a rank's share and a state.
"""

from __future__ import annotations

import bisect
import operator
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np

from penstock.errors import ConfigError, ShardChangedError, ShardIOError
from penstock.images.sample_record import ColumnRecord, ImageType, check_image_type, is_image, label_column
from penstock.order.permutation import normalise
from penstock.shards.mds.index import Columns, fingerprint, parse_index
from penstock.shards.mds.local_files import MDSFiles
from penstock.shards.mds.shard import MDSShard, Reader
from penstock.shards.shard_file import StoredShard
from penstock.sources.batched import BatchedDataset
from penstock.sources.files_source import FilesSource
from penstock.storage import Cache, File, Storage, is_remote
from penstock.storage.file_pool import FilePool
from penstock.storage.files import SHARD
from penstock.storage.transfer import Stat
from penstock.storage.urls import path_of, shown
from penstock.wording import counted

__all__ = ["MDSFolder"]


class MDSFolder(FilesSource, BatchedDataset):
    """The samples of an MDS dataset, map-style. All processes of a machine share the pages of the files.

    Args:
        path: the folder with ``index.json`` (for a merged index, the folder above the parts), or the URL of one in a
            store, such as ``"s3://bucket/imagenet"``: shards are fetched when they are first needed.
        split: a subfolder, such as ``"train"``.
        columns: the columns to read; by default all. Others cost only their space in the file.
        images: ``"pil"`` returns Pillow images, as MosaicML's reader does; ``"rgb"`` uint8 arrays (height, width, 3),
            which is faster; ``"bytes"`` leaves them encoded.
        allow_pickle: read columns of encoding ``pkl``, which can run any code of their writer.
        validate_hash: check each file by this hash of the index before its first use, such as ``"xxh64"``; by default
            sizes, headers and samples are checked, but not the content.
        cache_dir: the `penstock.storage.Cache` for decompressed shards, or its folder; by default the cache of
            ``storage``, in the user's cache folder. Its limit includes them.
        storage: access options, see `penstock.storage.Storage`.

    Raises:
        ConfigError: invalid arguments, or pickle that is not allowed.
        ShardIOError: a missing file or folder.
        StorageError: a store cannot be read, or the cache has no room for a shard.
        ShardError: a damaged index or shard. (When a sample is read, it names shard, sample and column.)

    Opening reads only the index. A pickle is a handle: the other process opens the same folder, and refuses another.
    A local folder without hashes in its index counts as another one once its ``index.json`` has been written again.
    """

    pure = True
    fork_safe = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        split: str | None = None,
        columns: Sequence[str] | None = None,
        images: ImageType = "pil",
        allow_pickle: bool = False,
        validate_hash: str | None = None,
        cache_dir: Cache | str | os.PathLike[str] | None = None,
        storage: Storage | None = None,
    ) -> None:
        check_image_type(images)
        if isinstance(columns, str):
            raise ConfigError(f"columns={columns!r} must be a list of names")
        remote = is_remote(path)
        if storage is not None and not remote:
            raise ConfigError(f"storage= is for URLs, but {path!r} is a local folder")
        self.path = os.path.join(os.fspath(path).rstrip("/") if remote else _local(path), *([split] if split else []))
        self.images, self.allow_pickle = images, allow_pickle
        self._names = None if columns is None else tuple(columns)
        cache = cache_dir if cache_dir is None or isinstance(cache_dir, Cache) else os.path.abspath(_local(cache_dir))
        self._storage, how = storage, (storage or Storage()) if remote else None
        self._files = MDSFiles(self.path, how, cache_dir=cache, validate_hash=validate_hash)
        if how is not None:
            name = f"{self.path}/index.json"
            self._index, file = parse_index(how.read(name), shown(name)), None
        else:
            file = _index_file(self.path)
            self._index = parse_index(file.read_exact(file.size, 0), file.path)
        # Without hashes, the fingerprint does not tell contents apart.
        self._written: tuple[int, int] | None = None
        if file is not None and not all(shard.raw.hashes for shard in self._index.shards):
            file.settle()
            self._written = file.size, file.mtime_ns
        self.starts = self._index.starts
        self._starts: list[int] = self.starts.tolist()
        self._readers: dict[Columns, Reader] = {}
        self._open: FilePool[MDSShard] = FilePool(copies=True)
        for shared in {id(shard.columns): shard.columns for shard in self._index.shards}.values():
            try:
                self._readers[shared] = Reader(shared, self._names, images=images, allow_pickle=allow_pickle)
            except ConfigError as error:
                raise ConfigError(f"{self.path}: {error}") from None

    # Properties.

    def __len__(self) -> int:
        return self._starts[-1]

    def __repr__(self) -> str:
        return (
            f"<MDSFolder of {counted(len(self), 'sample')} in {counted(len(self._index.shards), 'shard')}: "
            f"{shown(self.path)}>"
        )

    @property
    def fingerprint(self) -> str:
        """The identity of the samples: a hash of sizes, columns and hashes in the index, without paths."""
        return self._index.fingerprint

    @property
    def version(self) -> str:
        return "" if self._written is None else f"{self.path} {self._written}"

    @property
    def columns(self) -> dict[str, str]:
        """The columns that are read, with their encodings, from the first shard."""
        if not self._index.shards:
            return {}
        names, encodings, _ = self._index.shards[0].columns
        there = dict(zip(names, encodings, strict=True))
        return there if self._names is None else {name: there[name] for name in self._names}

    @property
    def shard_sizes(self) -> list[int]:
        """The number of samples of each shard."""
        return [shard.samples for shard in self._index.shards]

    def stored(self) -> list[StoredShard]:
        """Return the shards that are fetched from a store uncompressed."""
        return self._files.stored(self._index.shards)

    def prefixes(self, rows: int) -> list[str]:
        return [fingerprint(self._index.shards[:end]) for end, start in enumerate(self._starts) if start == rows]

    # Samples.

    def __getitem__(self, index: SupportsIndex) -> dict[str, Any]:
        """Return one sample. Negative numbers count from the end; IndexError outside."""
        number, length = operator.index(index), len(self)
        if not -length <= number < length:
            raise IndexError(f"index {number} is out of range for {counted(length, 'sample')}")
        return self._sample(number % length)

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Return several samples, in this order."""
        return self.records(indices)

    def load_samples(self, indices: Sequence[int], keys: Sequence[int] | None) -> list[dict[str, Any]]:
        """Return several samples, for our loaders; keys are ignored, since nothing is random."""
        return self.records(indices)

    def records(self, rows: Any) -> list[dict[str, Any]]:
        """Return several samples, in this order; they are read in file order."""
        numbers = normalise(rows, len(self))
        order = np.argsort(numbers, kind="stable").tolist()
        samples: list[Any] = [None] * len(order)
        for place, number in zip(order, numbers[order].tolist(), strict=True):
            samples[place] = self._sample(number)
        return samples

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield all samples in file order."""
        return map(self._sample, range(len(self)))

    def _sample(self, number: int) -> dict[str, Any]:
        shard = bisect.bisect_right(self._starts, number) - 1
        found = self._open.find(shard)
        if found is None:
            if self._written is not None:
                _index_file(self.path).expect(*self._written)
            info = self._index.shards[shard]
            found = self._open.add(shard, MDSShard(self._files.open(info), info, self._readers[info.columns]))
        return found[number - self._starts[shard]]

    def row_name(self, row: int) -> str:
        """Return folder, shard and sample, for messages."""
        shard = bisect.bisect_right(self._starts, row) - 1
        return f"{shown(self.path)}: sample {row - self._starts[shard]} of shard {shard}"

    def image_and_label(self) -> tuple[str, str | None]:
        """Return the columns of images and labels, for `penstock.ImageDataset`: the first column of encoded image
        files, and see `label_column`.

        Raises:
            ConfigError: the images are already decoded, there is no image column, or several columns may be the label.
        """
        if self.images != "bytes":
            raise ConfigError(f"{self.path}: ImageDataset decodes the images itself: open it with images='bytes'")
        for name, encoding in self.columns.items():
            named = encoding == "bytes" and (name in ("image", "img") or is_image(f".{name}"))
            if encoding in ("jpeg", "png") or named:
                return name, label_column(self.path, self.columns, name)
        found = ", ".join(f"{name} ({encoding})" for name, encoding in self.columns.items())
        raise ConfigError(
            f"{self.path}: no column of encoded images (jpeg, png). The columns are {found}. For other encodings give "
            "load=, a function of a sample"
        )

    def image_records(self, indices: Any) -> list[ColumnRecord]:
        """Return several samples as image records, for `penstock.ImageDataset`. Raises as `image_and_label` does."""
        rows, (image, label) = normalise(indices, len(self)), self.image_and_label()
        return [
            ColumnRecord(sample[image], f"{self.path}, sample {row}", sample, label, row)
            for row, sample in zip(rows.tolist(), self.records(rows), strict=True)
        ]

    def __reduce__(self) -> tuple[Any, ...]:
        options = {
            "columns": self._names,
            "images": self.images,
            "allow_pickle": self.allow_pickle,
            "validate_hash": self._files.validate_hash,
            "cache_dir": self._files.cache_dir,
            "storage": self._storage,
        }
        version = self.fingerprint, self._written
        return _reopen, (type(self), self.path, options, version, self._files.versions)


def _reopen(
    kind: type[MDSFolder], path: str, options: dict[str, Any], version: tuple[Any, ...], versions: dict[str, Stat]
) -> MDSFolder:
    folder = kind(path, **options)
    folder._files.versions |= versions
    if (folder.fingerprint, folder._written) != version:
        raise ShardChangedError(f"{path} no longer holds the dataset that was opened: open it again")
    return folder


def _local(path: str | os.PathLike[str]) -> str:
    found = path_of(path)
    if not found:
        raise ConfigError(f"{path!r} is not a local folder")
    return found


def _index_file(folder: str) -> File:
    try:
        return File(os.path.abspath(os.path.join(folder, "index.json")), SHARD)
    except ShardIOError as error:
        splits = sorted(found.parent.name for found in Path(folder).glob("*/index.json"))
        if splits:
            error.args = (f"{error}; there is one in {', '.join(splits)}: name it with split=",)
        raise
