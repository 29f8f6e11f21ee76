"""`ImageDataset`: records to images, through a plain resize or a chain of transforms, straight into the batch.

images = ImageDataset(Manifest.open("train.txt", root="/data"), transform=[RandomResizedCrop(224), HorizontalFlip()])
image, label = images[0]        # uint8 tensor (3, 224, 224), RGB, channels_last in memory; int
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, cast

import numpy as np
import torch
from torch.utils.data import default_collate

from penstock.datasets.delegation import OF_THE_SOURCE, Around
from penstock.datasets.loading import Item, LoadImage
from penstock.datasets.rank import RankDataset
from penstock.datasets.source_dataset import SourceDataset
from penstock.datasets.stream import MPDataset
from penstock.errors import ConfigError
from penstock.images.decode import MAX_PIXELS
from penstock.images.entries import ImageIndex
from penstock.images.learning import find_index
from penstock.images.sample_record import SampleRecord
from penstock.images.transforms import Compose
from penstock.manifest import Manifest, Record
from penstock.manifest.classes import HasClasses, unknown_classes
from penstock.plan.share import MiniEpoch
from penstock.random import call_in_scope, in_sample, load_each
from penstock.sources.batched import BatchedDataset, StreamDataset
from penstock.storage import Storage, is_remote

if TYPE_CHECKING:
    from penstock.datasets.mds_images import MDSImages

__all__ = ["ImageDataset", "LoadImage"]

Into = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
"""Gives memory for the images of a batch: of this shape and type, the first dimension the batch."""


class _Records(Protocol):
    def __len__(self) -> int: ...
    def records(self, indices: Any) -> list[Record]: ...


class ImageDataset(Around, HasClasses, BatchedDataset):
    """Images and labels of a manifest, or of anything else that yields records. `penstock.open` makes it of a folder.

    Args:
        source: a `Manifest`, a path to one, a `RankDataset`, a `ServerDataset` or `RankServerDataset`, a `ShardDataset`
            or `ShardSet` (the first image of each sample, and its ``cls``), a `TableDataset` or `TableFiles` (the first
            column of images, and the label), an `MDSDataset` or `MDSFolder` with ``images="bytes"`` (the same), or an
            `MPDataset` (the result is then iterable-style).
        index: an index of entries, with which crops are decoded in less time, to the same pixels: the path of one
            (`penstock images index`), or True for the one beside the manifest, else that which was learned. "learn":
            both, and what they do not know is learned on the way (0.5 ms for each photograph, once) and kept in the
            manifest's ``cache_dir`` or the user's cache, for later epochs and all processes of the machine.
            Of a file that has this name write ``"./learn"``. Those of shards need no word: they are used where they lie
            beside local shards (`penstock shards pack --index-images`), unless this is False.
        size, flip, row, transform, target, max_pixels: see `LoadImage`.
        storage: how images at remote addresses are reached; by default as the manifest was told.

    Raises:
        ConfigError: a source that yields no records, or one with a ``load`` of its own; an index for records that are
            not a manifest's; arguments as in `LoadImage`.
        ManifestError: the manifest cannot be opened, or the index; or there is no place to learn one.
        StateError: the index is that of another manifest.
        ImageError: (on access) an image that is missing or cannot be decoded; it names the path.

    Items are ``(image, label)``, with ``row=True`` also the row: a uint8 tensor (3, height, width), RGB, with
    channels_last strides unless the transform says otherwise, and the record's label. Epoch, state and the like are
    those of the source. Images are decoded when asked for; nothing is kept.

    A loader with the default collate function has images that all become the same size written where the batch is to
    be, so they are never copied. What an image becomes depends on its record and key alone, not on the batch around it.
    Where an image is shrunk to half or less, it also depends on whether the C extension is there (see
    `penstock.images.region`).
    """

    releases_gil = False  # not enough of its time: threads wait for each other's Python (docs/performance.md)
    channels_last = True
    fills_rows = True

    def __new__(cls, source: Any, **options: Any) -> ImageDataset:
        """A stream over a stream, else a map-style data set."""
        if isinstance(source, MPDataset):
            options.setdefault("storage", _storage(source.samples))
            options["index"] = _index(source, options.get("index"))
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
        transform: Compose | Iterable[Callable[..., Any]] | Callable[..., Any] | None = None,
        target: Callable[[Any], dict[str, Any]] | None = None,
        max_pixels: int = MAX_PIXELS,
        index: str | os.PathLike[str] | bool | None = None,
    ) -> None:
        self.source: _Records = _records(source, storage)
        """What gives the records, with their order, place and state."""
        self._mds = _mds_images(source)
        storage = storage if storage is not None else _storage(self.source)
        how: dict[str, Any] = {"size": size, "flip": flip, "row": row, "transform": transform, "target": target}
        self.load = LoadImage(storage=storage, max_pixels=max_pixels, index=_index(self.source, index), **how)

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {self.source!r}"

    @property
    def pure(self) -> bool:
        """Whether items depend on their record and `penstock.generator` alone; see `LoadImage`."""
        return not self.own_items and self.load.pure

    def class_names(self) -> list[str] | None:
        """Return the names of the source's classes by label; None if it says none."""
        return _class_names(self.source)

    def __getnewargs__(self) -> tuple[Any]:
        return (self.source,)

    def __copy__(self) -> Self:
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        # A copy goes its own way, see `SourceDataset`.
        made.source = copy.copy(self.source)
        made._mds = _mds_images(made.source)
        return made

    def around(self, source: Any) -> Self:
        """Return the same images around another data set of records."""
        made = super().around(source)
        made._mds = _mds_images(source)
        return made

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Item:
        if isinstance(self.source, Manifest):  # one record is found faster by itself than as a batch of one
            return self.load(self.source[index])
        return ImageDataset.__getitems__(self, [index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Item]:
        """Several items, their records looked up at once."""
        source, keys = self.source, None
        if isinstance(source, SourceDataset) and not in_sample():
            keys = source.keys(indices)
        return ImageDataset.load_samples(self, indices, keys)

    def load_samples(
        self,
        indices: Sequence[int],
        keys: Sequence[int] | None,
        place: MiniEpoch | None = None,
        *,
        into: Into | None = None,
    ) -> list[Item]:
        """The items at several indices, each made in the scope of its key; at another place of the source than the
        present one if that is given; their images in the memory that `into` gives, if they all have one size.
        """
        rows = np.asarray(indices, dtype=np.int64)
        source: Any = self.source
        if self._mds is not None:
            read: Any = self._mds.records
        else:
            # Of tables, since `records` would decode the images, and of shards, which know their entries.
            read = getattr(source, "image_records", source.records)
        records = read(rows) if place is None else read(rows, place)
        if records and isinstance(records[0], dict):
            records = [SampleRecord(sample) for sample in records]
        if records and type(records[0]) is SampleRecord and self.load.row:
            raise ConfigError("row=True: samples of shards have keys instead of rows")
        if type(self.load) is not LoadImage:  # which may not take data= and out=
            return load_each(self.load, records, keys)
        form = self.load.form if into is not None and records else None
        images = into((len(records), *form[0]), form[1]) if into is not None and form is not None else None
        if len(records) < 2 or not all(is_remote(record.path) for record in records):
            return _load_into(self.load, records, keys, images)
        storage = self.load.storage or Storage()
        with storage.read_ahead([record.path for record in records]) as ahead:
            return _load_into(self.load, records, keys, images, ahead.next)

    def fetch_batch(
        self, indices: Sequence[int], keys: Sequence[int] | None, empty: Into, place: MiniEpoch | None = None
    ) -> tuple[Any, ...]:
        """A whole batch ``(images, labels)``, as the default collate function makes it of `load_samples`.

        Args:
            indices: of the items.
            keys: of their generators (see `penstock.random`); None: in the scope that is there.
            empty: ``empty(shape, dtype)`` gives the memory for the images, if they all have one size: (n, height,
                width, 3), or (n, 3, height, width) after ``ToTensor(channels_last=False)``.
            place: another place of the source than the present one.

        Loaders do not come this way: they have the rows of one batch written by several workers at once.
        """
        given: list[torch.Tensor] = []

        def into(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            given.append(empty(shape, dtype))
            return given[0]

        items = ImageDataset.load_samples(self, indices, keys, place, into=into)
        if not given:
            return tuple(default_collate(items))
        last = not items[0][0].is_contiguous()  # (height, width, channels) in memory
        return given[0].permute(0, 3, 1, 2) if last else given[0], *default_collate([item[1:] for item in items])

    def __getattr__(self, name: str) -> Any:
        if name in OF_THE_SOURCE:
            return getattr(self.source, name)
        if name in ("classes", "class_to_idx"):
            # Python comes here when the property has raised an AttributeError.
            raise unknown_classes(self)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def _load_into(
    load: LoadImage,
    records: Sequence[Any],
    keys: Sequence[int] | None,
    images: torch.Tensor | None,
    data: Callable[[], bytes] | None = None,
) -> list[Item]:
    """The items of records, their images in the rows of a tensor; the bytes from `data`, which gives them in turn."""
    if images is None:
        return load_each(load if data is None else partial(load, data=data), records, keys)
    rows = iter(images.unbind())
    return load_each(lambda record: load(record, data, next(rows)), records, keys)


class _ImageStream(HasClasses, StreamDataset):
    """`ImageDataset` over an `MPDataset`."""

    releases_gil = False  # not enough of its time: threads wait for each other's Python (docs/performance.md)
    channels_last = True

    def __init__(self, source: MPDataset, load: LoadImage) -> None:
        _records(source.samples)
        self.source = source
        self.load = load
        self.pure = load.pure
        self.batch_size = source.batch_size
        self.drop_last = source.drop_last

    def class_names(self) -> list[str] | None:
        return _class_names(self.source.manifest)

    @property
    def samples(self) -> ImageDataset:
        """The same images as a map-style data set."""
        load = self.load
        samples = ImageDataset(self.source.samples, storage=load.storage)
        samples.load = load
        return samples

    def __copy__(self) -> Self:
        made = object.__new__(type(self))
        made.__dict__ = {**self.__dict__, "source": copy.copy(self.source)}
        return made

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> Iterator[Item]:
        for key, record in self.source.iter_records():
            yield call_in_scope(key, self.load, record)

    def __getattr__(self, name: str) -> Any:
        if name in OF_THE_SOURCE:
            return getattr(self.source, name)
        if name in ("classes", "class_to_idx"):
            # Python comes here when the property has raised an AttributeError.
            raise unknown_classes(self)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def _class_names(source: Any) -> list[str] | None:
    if isinstance(source, HasClasses):
        return source.class_names()
    if isinstance(source, Manifest):
        return source.classes
    from penstock.tables import TableFiles  # pyarrow is not needed by those who have no tables

    return source.label_names() if isinstance(source, TableFiles) else None


def _mds_images(source: Any) -> MDSImages | None:
    """Return which columns of MDS samples are image and label; None for other sources."""
    if isinstance(source, str | os.PathLike | Manifest | RankDataset):
        return None
    from penstock.datasets.mds import MDSDataset
    from penstock.shards.mds import MDSFolder

    if not isinstance(source, MDSDataset | MDSFolder):
        return None
    from penstock.datasets.mds_images import MDSImages

    return MDSImages(source)


def _storage(source: Any) -> Storage | None:
    """What the manifest under a source was told of remote addresses."""
    manifest = getattr(source, "manifest", source)
    return manifest.storage if isinstance(manifest, Manifest) else None


def _index(source: Any, index: str | os.PathLike[str] | bool | None) -> ImageIndex | Literal[False] | None:
    """The index of entries of the manifest under a source; None and False are what they are."""
    if index is None or index is False:
        return index
    manifest = getattr(source, "manifest", source)
    if not isinstance(manifest, Manifest):
        raise ConfigError(
            f"index= is for images of a manifest, and a {type(source).__name__} is made of none: leave index= out "
            "(entries of shards lie beside them, and need no word)"
        )
    if index is True or index == "learn":
        return find_index(manifest, learn=index == "learn")
    if not isinstance(index, str | os.PathLike) or index == "":
        raise ConfigError(f"index= is the path of an index of entries, True, False or 'learn', not {index!r}")
    return ImageIndex.open(index, manifest)


def _records(source: Any, storage: Storage | None = None) -> _Records:
    if isinstance(source, str) or hasattr(source, "__fspath__"):
        return Manifest.open(source, storage=storage)
    if not hasattr(source, "records"):
        raise ConfigError(f"ImageDataset needs a source of records (Manifest, RankDataset, ...), got {type(source)}")
    if getattr(source, "load", None) is not None:
        kind = type(source).__name__
        raise ConfigError(f"this {kind} has a load= of its own: leave it out, ImageDataset loads the records")
    return cast(_Records, source)
