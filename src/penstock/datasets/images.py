"""`ImageDataset`: decoded images, with a plain resize or a chain of transforms, written straight into the batch.

images = ImageDataset(Manifest.open("train.txt", root="/data"), transform=[RandomResizedCrop(224), HorizontalFlip()])
image, label = images[0]        # uint8 tensor (3, 224, 224), RGB, channels_last in memory; int
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from functools import partial
from typing import Any, Literal, cast

import numpy as np
import torch

from penstock.datasets.arrays import ArrayDataset
from penstock.datasets.image_batches import draw, draws_of, load_batch
from penstock.datasets.loading import Item, LoadImage
from penstock.datasets.pixel_rows import PixelRows
from penstock.datasets.rank import RankDataset
from penstock.datasets.source_dataset import Empty, SourceDataset, SourceWrapper, load_into
from penstock.datasets.stream import MPDataset
from penstock.errors import ConfigError
from penstock.images.decode import MAX_PIXELS
from penstock.images.entries import ImageIndex, find_index
from penstock.images.sample_record import SampleRecord
from penstock.images.transforms import Compose
from penstock.manifest import Manifest
from penstock.manifest.classes import HasClasses
from penstock.plan.share import MiniEpoch
from penstock.random import in_sample, load_each, shown_record
from penstock.sources.batched import BatchedDataset
from penstock.storage import Storage, is_remote
from penstock.wording import kind_text

__all__ = ["ImageDataset", "LoadImage"]


class ImageDataset(SourceWrapper, HasClasses, BatchedDataset):
    """Images and labels of a manifest, or of any other source of image records. `penstock.open` creates one for a
    folder.

    Args:
        source: a `Manifest` or its path, a `RankDataset`, `ServerDataset` or `RankServerDataset`; a `ShardDataset` or
            `ShardSet` (the first image of each sample, and its ``cls``); a `TableDataset` or `TableFiles` (the first
            image column, and the label); an `MDSDataset` or `MDSFolder` with ``images="bytes"`` (likewise); an
            `ArrayDataset` of pixels (see below); or an `MPDataset` (the result is then iterable-style).
        index: an index of entries. It makes decoding of crops faster, with the same pixels. A path: this index
            (`penstock images index`). True: the index beside the manifest, else the learned one. "learn": use both;
            missing entries are learned while you train (0.5 ms per image, once) and stored in the manifest's
            ``cache_dir`` or the user's cache, for later epochs and for all processes of the machine. If your file is
            called "learn", write ``"./learn"``. Indexes beside local shards (`penstock shards pack --index-images`) are
            used automatically, unless this is False.
        size, flip, row, transform, target, max_pixels: see `LoadImage`.
        storage: access to images at remote addresses; by default the manifest's own.

    Raises:
        ConfigError: the source has no records or its own ``load``; an index for records that are not from a
            manifest; invalid arguments, see `LoadImage`.
        ManifestError: the manifest or the index cannot be opened; or there is no folder to store a learned index.
        StateError: the index belongs to another manifest.
        ImageError: (on access) an image is missing or cannot be decoded; the message names its path.

    Items are ``(image, label)``, or ``(image, label, row)`` with ``row=True``. ``image`` is a uint8 tensor (3, height,
    width), RGB, with channels_last strides, unless the transform says otherwise. Epoch, order and state are the
    source's. Images are decoded on access and not cached.

    With the default collate function, a loader writes images of one size directly into the batch, without a further
    copy. An image's pixels depend only on its record and its key, not on its batch. If an image is shrunk to half its
    size or less, the pixels also depend on whether the C extension is installed (see `penstock.images.region`).

    Rows of an `ArrayDataset` are images if they are uint8 of (height, width, 3), (height, width, 1) or (height, width).
    A label that is one integer becomes an int. Without ``labels=`` and `target`, an item is the image alone.
    """

    # Decoding releases the GIL, but not for long enough: threads would wait for each other (docs/performance.md).
    releases_gil = False
    channels_last = True
    fills_rows = True
    makes_batches = True

    def __new__(cls, source: Any, **options: Any) -> ImageDataset:
        """Return an iterable-style dataset for an iterable-style source, else a map-style dataset."""
        if isinstance(source, MPDataset):
            return cast(ImageDataset, _ImageStream(source, options))
        return super().__new__(cls)

    def __init__(
        self,
        source: Any,
        *,
        size: int | tuple[int, int] | None = None,
        flip: bool = False,
        row: bool = False,
        storage: Storage | None = None,
        transform: Compose | Iterable[Callable[..., Any]] | Callable[..., Any] | None = None,
        target: Callable[[Any], dict[str, Any]] | None = None,
        max_pixels: int = MAX_PIXELS,
        index: str | os.PathLike[str] | bool | None = None,
    ) -> None:
        if isinstance(source, str | os.PathLike):
            source = Manifest.open(source, storage=storage)
        kind = type(source).__name__
        self._rows = PixelRows(source) if isinstance(source, ArrayDataset) else None
        # The result of `target` takes the place of the label.
        self._has_labels = self._rows is None or source.labels is not None or target is not None
        if row and not self._has_labels:
            raise ConfigError("row=True needs labels: without them, an item of an ArrayDataset is the image alone")
        if not hasattr(source, "records"):
            raise ConfigError(
                f"ImageDataset needs a source of records (Manifest, RankDataset, ...), got {type(source)}"
            )
        if getattr(source, "load", None) is not None:
            raise ConfigError(f"this {kind} has its own load=: leave it out, because ImageDataset loads the records")
        self.source = source
        """The dataset of the records, with their order, position and state."""
        if (columns := getattr(source, "image_and_label", None)) is not None:
            columns()
        manifest = getattr(source, "manifest", source)
        if isinstance(manifest, Manifest) and storage is None:
            storage = manifest.storage
        how: dict[str, Any] = {"size": size, "flip": flip, "row": row, "transform": transform, "target": target}
        self.load = LoadImage(storage=storage, max_pixels=max_pixels, index=_index(manifest, source, index), **how)
        if self._rows is not None:
            height, width, _ = self._rows.shape
            if height * width > max_pixels:
                raise ConfigError(f"images of {height} x {width} pixels (height, width), more than {max_pixels=}")
            self.load.form = self._rows.form(self.load.transform)
        self.makes_batches = self._rows is not None and draws_of(self.load) is not None and type(self).makes_batches

    @property
    def pure(self) -> bool:
        """Whether items depend only on their record and `penstock.generator`; see `LoadImage`."""
        return not self.own_items and self.load.pure

    def class_names(self) -> list[str] | None:
        source = self.source
        if isinstance(source, HasClasses):
            return source.class_names()
        if isinstance(source, Manifest):
            return source.classes
        # Imported here: without tables, pyarrow is not needed.
        from penstock.tables import TableFiles

        return source.label_names() if isinstance(source, TableFiles) else None

    def __getnewargs__(self) -> tuple[Any]:
        return (self.source,)

    def __getitem__(self, index: int) -> Item:
        # Both are faster than a batch of one record.
        if isinstance(self.source, Manifest):
            return self.load(self.source[index])
        if type(self.source) is RankDataset:
            return cast(Item, self.source.load_one(index, self.load if in_sample() else self._load_named))
        return ImageDataset.__getitems__(self, [index])[0]

    def _load_named(self, record: Any) -> Item:
        """Load a record; an error gets a note that names it, as from `load_each`."""
        try:
            return self.load(record)
        except Exception as error:
            error.add_note(f"while loading {shown_record(record)}")
            raise

    def __getitems__(self, indices: Sequence[int]) -> list[Item]:
        source = self.source
        keys = source.keys(indices) if isinstance(source, SourceDataset) and not in_sample() else None
        return ImageDataset.load_samples(self, indices, keys)

    def fetch_batch(
        self, indices: Sequence[int], keys: Sequence[int], empty: Empty, place: MiniEpoch | None = None
    ) -> Any:
        """Return the images of arrays at several indices, and their labels. See `BatchedDataset`."""
        load, arrays, rows = self.load, self._rows, self.source._rows_of_batch(indices, place)
        form, transform = load.form, load.transform
        assert arrays is not None
        assert form is not None
        pixels, labels = arrays.pixels(rows), arrays.labels(rows, empty)
        images = empty((len(rows), *form[0]), form[1])
        # Another machine may have opened the dataset, and this one lack the extension.
        drawn = np.zeros(len(rows), bool) if draws_of(load) is None else draw(load, pixels, keys, images)
        for number in np.flatnonzero(~drawn).tolist():
            image = load_each(partial(load, out=images[number]), arrays.records(rows[[number]]), [keys[number]])[0][0]
            if image.data_ptr() != images[number].data_ptr():
                raise ConfigError("steps of transform= were changed: create the ImageDataset of arrays again")
        if transform.form.channels_last:
            images = images.permute(0, 3, 1, 2)
        if labels is None:
            return images
        return [images, labels, torch.tensor(rows)] if load.row else [images, labels]

    def load_samples(
        self,
        indices: Sequence[int],
        keys: Sequence[int] | None,
        place: MiniEpoch | None = None,
        *,
        into: Empty | None = None,
    ) -> list[Item]:
        """Return the items at several indices of the source. See `SourceDataset.load_samples`.

        ``into`` allocates the memory for the images, if they all have one size.
        """
        rows = np.asarray(indices, dtype=np.int64)
        source = self.source
        records: Any
        if self._rows is not None:
            records = self._rows.records(source.rows(rows, place))
        else:
            # For tables, `records` would decode the images; for shards, `image_records` also returns the entries.
            read = getattr(source, "image_records", source.records)
            records = read(rows) if place is None else read(rows, place)
        if records and isinstance(records[0], dict):
            records = [SampleRecord(sample) for sample in records]
        if records and type(records[0]) is SampleRecord and self.load.row:
            raise ConfigError("row=True: samples of shards have keys instead of rows: leave row= out")
        several = len(records) > 1 and not isinstance(records[0], SampleRecord)
        form = None if into is None else self.load.form
        # A subclass may not accept data= and out=.
        if type(self.load) is not LoadImage:
            items = load_each(self.load, records, keys)
        elif several and all(is_remote(record.path) for record in records):
            storage = self.load.storage or Storage()
            with closing(storage.read_ahead([record.path for record in records])) as ahead:
                items = load_into(partial(self.load, data=partial(next, ahead)), form, records, keys, into)
        elif keys is not None and len(records) > 1 and draws_of(self.load) is not None:
            items = load_batch(self.load, records, keys, into)
        else:
            items = load_into(self.load, form, records, keys, into)
        return items if self._has_labels else [item[0] for item in items]


class _ImageStream(HasClasses, MPDataset):
    """An `ImageDataset` over an `MPDataset`: the same stream, whose samples are images."""

    # As in `ImageDataset`.
    releases_gil = False
    channels_last = True
    samples: Any

    def __init__(self, source: MPDataset, options: dict[str, Any]) -> None:
        self.__dict__.update(source.__dict__)
        self.source = source
        self.samples = ImageDataset(self.samples, **options)
        self.load: LoadImage = self.samples.load

    def class_names(self) -> list[str] | None:
        return self.manifest.classes


def _index(
    manifest: Any, source: Any, index: str | os.PathLike[str] | bool | None
) -> ImageIndex | Literal[False] | None:
    """Return the index of entries for a source's manifest; return None and False unchanged."""
    if index is None or index is False:
        return index
    if not isinstance(manifest, Manifest):
        raise ConfigError(
            f"index= is for images of a manifest, and {kind_text(source)} has no manifest: leave index= out "
            "(the indexes beside shards are used automatically)"
        )
    if index is True or index == "learn":
        return find_index(manifest, learn=index == "learn")
    if not isinstance(index, str | os.PathLike) or index == "":
        raise ConfigError(f"index= takes the path of an index of entries, True, False or 'learn', got {index!r}")
    return ImageIndex.open(index, manifest)
