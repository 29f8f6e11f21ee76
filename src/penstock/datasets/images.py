"""`ImageDataset`: records to images, in a first, plain form: decode, resize, optional flip.

images = ImageDataset(Manifest.open("train.txt", root="/data"), size=224, flip=True)
image, label = images[0]        # uint8 tensor (3, 224, 224), RGB, channels_last in memory; int
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, cast

import cv2
import numpy as np
import torch

from penstock.datasets.base import BatchedDataset, StreamDataset
from penstock.datasets.place import Place
from penstock.datasets.share_dataset import ShareDataset
from penstock.datasets.stream import MPDataset
from penstock.errors import ConfigError, ImageError
from penstock.images.decode import read_image
from penstock.manifest import Manifest, Record
from penstock.random import generator, in_sample, load_each, sample_scope
from penstock.stages import stage
from penstock.storage import Storage, is_remote

__all__ = ["ImageDataset", "LoadImage"]

Item = tuple[Any, ...]

# What a data set with an order of its own offers, and a wrapper passes on.
_OF_THE_SOURCE = frozenset(
    {"epoch", "load_state_dict", "mini_epoch", "next_mini_epoch", "running", "samples", "seed", "set_epoch"}
    | {
        "peek_pass",
        "rank",
        "world_size",
        "place",
        "set_mini_epoch",
        "splits_by_rank",
        "start_pass",
        "state_dict",
        "batch_size",
        "drop_last",
        "fingerprint",
        "fork_safe",
    }
)


_IMAGES = frozenset({"jpg", "jpeg", "png", "webp", "bmp", "ppm", "pgm", "tif", "tiff"})
_LABELS = ("cls", "class", "label", "index")


class LoadImage:
    """``load(record) -> (image, label)``, or ``(image, label, row)``; picklable, for ``load=`` of any data set.

    Args:
        size: ``(height, width)``, or one int for both; None keeps the size of the file. The image is resized as a
            whole, without keeping its aspect ratio: pixel areas are averaged when it shrinks, else interpolated.
        flip: mirror left to right with probability 1/2, drawn from the sample's own `penstock.generator`.
        row: add the row number of the manifest to the item.
        storage: how images at remote addresses are reached: `penstock.storage.Storage`.

    Raises:
        ConfigError: a size that is not positive.
        ImageError: (when called) a file that is missing or cannot be decoded; it names the path.

    The image is a uint8 tensor (3, height, width), RGB, not normalised, with channels_last strides. EXIF orientation
    is ignored. Decoding and resizing release the GIL. In the statistics of a loader they are the stages ``decode`` and
    ``resize``; flipping is ``augment``.
    """

    pure = True

    def __init__(
        self,
        *,
        size: int | tuple[int, int] | None = None,
        flip: bool = False,
        row: bool = False,
        storage: Storage | None = None,
    ) -> None:
        self.storage = storage
        self.size = (size, size) if isinstance(size, int) else size
        if self.size is not None and (len(self.size) != 2 or min(self.size) < 1):
            raise ConfigError(f"size must be positive, (height, width) or one int, got {size}")
        self.flip = flip
        self.row = row

    def __call__(self, record: Record | SampleRecord, data: Callable[[], bytes] | None = None) -> Item:
        """Decode one record's image, of the bytes that ``data`` gives, or of the file."""
        if isinstance(record, SampleRecord):
            data = record.read
        with stage("decode"):
            image = read_image(record.path, storage=self.storage, data=data)
        if self.size is not None and image.shape[:2] != self.size:
            height, width = self.size
            method = cv2.INTER_AREA if height <= image.shape[0] and width <= image.shape[1] else cv2.INTER_LINEAR
            with stage("resize"):
                image = cv2.resize(image, (width, height), interpolation=method)
        if self.flip:
            with stage("augment"):
                if generator().random() < 0.5:
                    image = np.ascontiguousarray(image[:, ::-1])
        item = torch.from_numpy(image).permute(2, 0, 1), record.label
        return (*item, record.row) if self.row else item


class SampleRecord:
    """A sample of shards as a record: its image, and its label.

    Raises:
        ImageError: (when made) the sample has no image.
    """

    row = -1

    def __init__(self, sample: dict[str, Any]) -> None:
        where = f"{sample.get('__url__')}/{sample.get('__key__')}"
        name = next((name for name in sample if name.rpartition(".")[2] in _IMAGES), None)
        if name is None:
            raise ImageError(f"{where}: a sample without an image: {', '.join(sample)}")
        self.path = f"{where}.{name}"
        self._data = sample[name]
        label = next((sample[name] for name in _LABELS if name in sample), None)
        self.label = int(label) if isinstance(label, bytes) and label.strip().isdigit() else label

    def __repr__(self) -> str:
        return f"<{self.path}>"

    def read(self) -> Any:
        """The bytes of the image."""
        return self._data


class _Records(Protocol):
    def __len__(self) -> int: ...
    def records(self, indices: Any) -> list[Record]: ...


class ImageDataset(BatchedDataset):
    """Images and labels of a manifest, or of anything else that yields records.

    Args:
        source: a `Manifest`, a path to one, a `RankDataset`, a `ServerDataset` or `RankServerDataset`, a `ShardDataset`
            or `ShardSet` (the first image of each sample, and its ``cls``), or an `MPDataset` (the result is then
            iterable-style).
        size, flip, row: see `LoadImage`.
        storage: how images at remote addresses are reached; by default as the manifest was told.

    Raises:
        ConfigError: a source that yields no records, or one with a ``load`` of its own.
        ManifestError: the manifest cannot be opened.
        ImageError: (on access) an image that is missing or cannot be decoded; it names the path.

    Items are ``(image, label)``, with ``row=True`` also the row: a uint8 tensor (3, height, width), RGB, with
    channels_last strides, and the record's label. Epoch, state and the like are those of the source. Images are decoded
    when asked for; nothing is kept.
    """

    pure = True
    releases_gil = True
    channels_last = True

    def __new__(cls, source: Any, **options: Any) -> ImageDataset:
        """A stream over a stream, else a map-style data set."""
        if isinstance(source, MPDataset):
            options.setdefault("storage", _storage(source.samples))
            return cast(ImageDataset, _ImageStream(source, LoadImage(**options)))
        return super().__new__(cls)

    def __init__(
        self,
        source: Any,
        *,
        size: int | tuple[int, int] | None = None,
        flip: bool = False,
        row: bool = False,
        storage: Storage | None = None,
    ) -> None:
        self.source: _Records = _records(source, storage)
        storage = storage if storage is not None else _storage(self.source)
        self.load = LoadImage(size=size, flip=flip, row=row, storage=storage)

    def __getnewargs__(self) -> tuple[Any]:
        return (self.source,)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Item:
        if isinstance(self.source, Manifest):  # one record is found faster by itself than as a batch of one
            return self.load(self.source[index])
        return ImageDataset.__getitems__(self, [index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Item]:
        """Several items, their records looked up at once."""
        source, keys = self.source, None
        if isinstance(source, ShareDataset) and not in_sample():
            keys = source.keys(indices)
        return ImageDataset.load_samples(self, indices, keys)

    def load_samples(
        self, indices: Sequence[int], keys: Sequence[int] | None, place: Place | None = None
    ) -> list[Item]:
        """The items at several indices, each made in the scope of its key; at another place of the source than the
        present one if that is given."""
        rows = np.asarray(indices, dtype=np.int64)
        source: Any = self.source
        records = source.records(rows) if place is None else source.records(rows, place)
        if records and isinstance(records[0], dict):
            if self.load.row:
                raise ConfigError("row=True: samples of shards have keys instead of rows")
            return load_each(self.load, [SampleRecord(sample) for sample in records], keys)
        plain = type(self.load) is not LoadImage  # which may not take data=
        if plain or len(records) < 2 or not all(is_remote(record.path) for record in records):
            return load_each(self.load, records, keys)
        storage = self.load.storage or Storage()
        with storage.read_ahead([record.path for record in records]) as ahead:
            return load_each(partial(self.load, data=ahead.next), records, keys)

    def __getattr__(self, name: str) -> Any:
        if name in _OF_THE_SOURCE:
            return getattr(self.source, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


class _ImageStream(StreamDataset):
    """`ImageDataset` over an `MPDataset`."""

    pure = True
    releases_gil = True
    channels_last = True

    def __init__(self, source: MPDataset, load: LoadImage) -> None:
        _records(source.samples)
        self.source = source
        self.load = load
        self.batch_size = source.batch_size
        self.drop_last = source.drop_last

    @property
    def samples(self) -> ImageDataset:
        """The same images as a map-style data set."""
        load = self.load
        return ImageDataset(self.source.samples, size=load.size, flip=load.flip, row=load.row, storage=load.storage)

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> Iterator[Item]:
        for key, record in self.source.iter_records():
            with sample_scope(key):
                item = self.load(record)
            yield item

    def __getattr__(self, name: str) -> Any:
        if name in _OF_THE_SOURCE:
            return getattr(self.source, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def _storage(source: Any) -> Storage | None:
    """What the manifest under a source was told of remote addresses."""
    manifest = getattr(source, "manifest", source)
    return manifest.storage if isinstance(manifest, Manifest) else None


def _records(source: Any, storage: Storage | None = None) -> _Records:
    if isinstance(source, str) or hasattr(source, "__fspath__"):
        return Manifest.open(source, storage=storage)
    if not hasattr(source, "records"):
        raise ConfigError(f"ImageDataset needs a source of records (Manifest, RankDataset, ...), got {type(source)}")
    if getattr(source, "load", None) is not None:
        kind = type(source).__name__
        raise ConfigError(f"this {kind} has a load= of its own: leave it out, ImageDataset loads the records")
    return cast(_Records, source)
