"""`LoadImage`: load a record as an image and a label, with a plain resize or a chain of transforms.

load = LoadImage(transform=[RandomResizedCrop(224), HorizontalFlip()])
image, label = load(record)         # uint8 tensor (3, 224, 224), RGB, channels_last in memory; int
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from penstock.datasets.pixel_rows import PixelRecord
from penstock.errors import ConfigError, ImageError
from penstock.images import native
from penstock.images.decode import MAX_PIXELS, decode, read_bytes
from penstock.images.entries import ImageIndex
from penstock.images.headers import TruncatedHeader, size_from_header
from penstock.images.jpeg import frame_size
from penstock.images.region import decode_region
from penstock.images.sample_record import SampleRecord
from penstock.images.transforms import Compose, HorizontalFlip, Resize
from penstock.images.transforms.base import check_size
from penstock.images.transforms.canvas import ArraySource, Canvas, PixelSource
from penstock.images.transforms.output import BYTES, Conversion, look_up_table
from penstock.images.transforms.targets import open_targets
from penstock.images.transforms.view import Pixels, View, render
from penstock.manifest import Record
from penstock.random import shown_record
from penstock.stages import account, spent, stage
from penstock.storage import Storage
from penstock.storage.urls import shown

__all__ = ["EncodedImage", "Item", "LoadImage", "chain_of"]

Item = tuple[Any, ...]

_JPEG = b"\xff\xd8"


class EncodedImage:
    """An encoded image as the source of a canvas; only the parts that are drawn are decoded.

    Args:
        data: the bytes of the image file.
        path: the path of the file, for error messages.
        max_pixels: raise an error for an image with more pixels.
        entries: returns the index of entries for these bytes, or None. It is called at most once: before the first
            decode of a part for which entries help.

    Raises:
        ImageError: the header is truncated before the image size, or the image has another format and cannot be
            decoded.

    Attributes:
        size: (height, width), read from the header if the format allows it.
    """

    def __init__(
        self,
        data: bytes,
        path: Any,
        max_pixels: int = MAX_PIXELS,
        entries: Callable[[], bytes | None] | None = None,
    ) -> None:
        self._data, self._path, self._max_pixels = data, path, max_pixels
        self._find_entries = entries
        self._entries: bytes | None = None
        self._pixels: Pixels | None = None
        # False once the C extension has declined to draw this image, too.
        self._extension_draws = native.is_available() and data[:2] == _JPEG
        try:
            size = frame_size(data) if self._extension_draws else size_from_header(data)
        except TruncatedHeader:
            raise ImageError(
                f"{shown(str(path))!r} is truncated: {len(data)} bytes, and no image size in them"
            ) from None
        if size is None or min(size) < 1:
            # The format has no simple header, or the header contains no size.
            with stage("decode"):
                self._pixels = decode(data, path=path, max_pixels=max_pixels)
            size = self._pixels.shape[1], self._pixels.shape[0]
        self.size = size[1], size[0]

    def draw(self, view: View) -> Pixels:
        """Return the pixels of a view; decode only the part of the image that it needs."""
        out = np.empty((*view.size, 3), np.uint8)
        if self.draw_converted(view, BYTES, out):
            return out
        pixels, box = self._pixels, view.box
        if pixels is None:
            height, width = self.size
            with stage("decode"):
                pixels, box = decode_region(
                    self._data,
                    box,
                    target=view.size,
                    path=self._path,
                    max_pixels=self._max_pixels,
                    size=(width, height),
                    entries=self._entries,
                )
        with stage("resize"):
            return render(pixels, box, view)

    def draw_converted(self, view: View, conversion: Conversion, out: npt.NDArray[Any]) -> bool:
        """Draw a view and convert its pixels in one call of the C extension; return False if the extension cannot."""
        (left, top, right, bottom), (height, width) = view.box, self.size
        if self._pixels is not None or not self._extension_draws:
            return False
        # If the view is nearly the whole image, entries save less time than hashing the file to look them up.
        if self._find_entries is not None and 16 * (right - left) * (bottom - top) <= 15 * height * width:
            self._entries, self._find_entries = self._find_entries(), None
        if view.interpolation == "nearest":
            return False
        clock = account.clock
        start = clock()
        try:
            resizing = native.draw_box(
                self._data,
                view.box,
                out,
                interpolation=view.interpolation,
                antialias=view.antialias,
                flipped=view.flipped,
                table=None if conversion.dtype is torch.uint8 else look_up_table(conversion, 3),
                planar=not conversion.channels_last,
                max_pixels=self._max_pixels,
                size=(width, height),
                entries=self._entries,
            )
        except (ValueError, NotImplementedError, OverflowError):
            # A whole decode tolerates stray bytes, converts CMYK, and reports errors and limits.
            resizing, self._extension_draws = 0.0, False
        spent("decode", clock() - start - resizing)
        spent("resize", resizing)
        return self._extension_draws


def chain_of(
    size: int | tuple[int, int] | None,
    flip: bool,
    transform: Compose | Iterable[Callable[..., Any]] | Callable[..., Any] | None,
) -> Compose:
    """Return the transform for these arguments.

    Args:
        size: (height, width), or one int for both; None keeps the file's size.
        flip: mirror left to right with probability 1/2.
        transform: image transforms, instead of `size` and `flip`.

    Raises:
        ConfigError: the size is not positive, or a transform is combined with a size or flip.
    """
    if transform is None:
        return Compose(([] if size is None else [Resize(check_size(size))]) + ([HorizontalFlip()] if flip else []))
    if size is not None or flip:
        raise ConfigError("size= and flip= are for loading without transform=: add Resize or HorizontalFlip to it")
    if isinstance(transform, Compose):
        return transform
    return Compose([transform] if callable(transform) else transform)


class LoadImage:
    """Load an image: ``load(record) -> (image, label)``, or ``(image, label, row)``.

    Picklable; usable as ``load=`` of any dataset.

    Args:
        size: ``(height, width)``, or one int for both; None keeps the file's size. The whole image is resized, without
            preserving its aspect ratio, as by `penstock.images.transforms.Resize`.
        flip: mirror left to right with probability 1/2, drawn from the sample's own `penstock.generator`.
        row: append the row number of the manifest to the item.
        storage: access to images at remote addresses, see `penstock.storage.Storage`.
        transform: instead of `size` and `flip`: a `penstock.images.transforms.Compose`, or a list of transforms.
        target: ``target(record) -> dict`` returns the image's targets (``masks``, ``boxes``, ...: see
            `penstock.images.transforms.targets`). They replace the label in the item, and the transform (or `size` and
            `flip`) applies to them as well. A function that draws nothing, or only from `penstock.generator`, can
            declare this with an attribute ``pure = True``; loaders then split its batches among workers.
        max_pixels: raise an error for an image with more pixels, instead of exhausting memory.
        index: an open index of entries, see `penstock.ImageDataset`. False: do not use the entries of shard samples
            either.

    Raises:
        ConfigError: the size is not positive; a transform together with a size or flip; an index without a transform;
            (when called) an index for a sample of shards.
        ImageError: (when called) a file is missing or cannot be decoded; the message names its path.

    The image is a uint8 tensor (3, height, width), RGB, not normalised, with channels_last strides, unless the
    transform says otherwise. EXIF orientation is ignored. Decoding and resizing release the GIL. A loader's statistics
    show them as the stages ``read``, ``decode``, ``resize`` and ``normalize``; flips and all other transforms are
    ``augment``.

    With a transform, only the part that its crops need is decoded. If the loader has allocated the batch's memory, the
    last transform writes into it.

    Attributes:
        pure: whether the item depends only on the record and `penstock.generator`.
    """

    def __init__(
        self,
        *,
        size: int | tuple[int, int] | None = None,
        flip: bool = False,
        row: bool = False,
        storage: Storage | None = None,
        transform: Compose | Iterable[Callable[..., Any]] | Callable[..., Any] | None = None,
        target: Callable[[Any], dict[str, Any]] | None = None,
        max_pixels: int = MAX_PIXELS,
        index: ImageIndex | Literal[False] | None = None,
    ) -> None:
        if max_pixels < 1:
            raise ConfigError(f"max_pixels must be at least 1, not {max_pixels}")
        self.max_pixels = max_pixels
        self.storage = storage
        self.size = None if size is None else check_size(size)
        if isinstance(index, ImageIndex) and transform is None:
            raise ConfigError(
                "index= needs transform=, which decodes parts of images; without it, whole images are decoded"
            )
        self.index = index
        self.transform = transform = chain_of(size, flip, transform)
        self.target = target
        self.flip = flip
        self.row = row
        self.form = transform.form.row
        """Shape in memory, and dtype, of every image; None if they differ between images."""
        repeats = target is None or bool(getattr(target, "pure", False))
        self.pure = repeats and transform.pure

    def __repr__(self) -> str:
        names = ["size", "flip", "row", "target", "index"]
        if self.size is None and not self.flip and self.transform.transforms:
            names.insert(3, "transform")
        given = [f"{name}={value!r}" for name in names if (value := getattr(self, name)) not in (None, False)]
        return f"LoadImage({', '.join(given)})"

    def __call__(
        self,
        record: Record | SampleRecord | PixelRecord | dict[str, Any],
        data: Callable[[], bytes] | None = None,
        out: torch.Tensor | None = None,
    ) -> Item:
        """Return the item of a record, or of a tar sample given as a dict.

        Args:
            record: the record.
            data: returns the bytes of the image; by default the record's file is read.
            out: the tensor to write the image to, with the shape and dtype of `form`.
        """
        if isinstance(record, dict):
            record = SampleRecord(record)
        if isinstance(record, SampleRecord):
            data = record.read
        source: PixelSource
        if isinstance(record, PixelRecord):
            source = ArraySource(record.pixels)
        else:
            encoded = read_bytes(record.path, storage=self.storage, data=data)
            index, find_entries = self.index, None
            if index is not False and isinstance(record, SampleRecord):
                if index is not None:
                    raise ConfigError(
                        f"{record!r}: index= is for images of a manifest, and samples of shards have no row in one"
                    )
                find_entries = None if record.entries is None else partial(record.entries, encoded)
            elif index is not False and index is not None:
                find_entries = partial(index.entries, record.row, encoded)
            source = EncodedImage(encoded, record.path, self.max_pixels, find_entries)
        if self.target is None:
            targets = {}
        else:
            targets = self.target(record)
            if not isinstance(targets, dict):
                raise ConfigError(
                    f"target= must return a dict, but returned {type(targets).__name__} for {shown_record(record)!r}"
                )
        with stage("augment"):
            canvas = Canvas(source, open_targets(targets, source.size) if targets else None, out)
            try:
                self.transform.apply(canvas)
            # A transform does not know the file's name.
            except ImageError as error:
                name = shown(str(record.path))
                if name in str(error):
                    raise
                raise ImageError(f"{name!r}: {error}") from error
            image = canvas.tensor
            if canvas.targets is not None:
                targets = canvas.targets.close()
        label = record.label if self.target is None else targets
        return (image, label, record.row) if self.row else (image, label)
