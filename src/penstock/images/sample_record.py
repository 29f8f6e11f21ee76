"""Samples of shards, MDS folders and tables as the records of images: which column is the image, which the label.

`penstock.wds` has its own list of the extensions of images, which is WebDataset's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeAlias, get_args

from penstock.errors import ConfigError, ImageError
from penstock.storage.urls import shown

__all__ = ["EXTENSIONS", "ColumnRecord", "ImageType", "SampleRecord", "check_image_type", "is_image", "label_column"]

ImageType: TypeAlias = Literal["rgb", "pil", "bytes"]
"""The type of the images in samples of tables and MDS folders: arrays, Pillow images, or encoded."""

EXTENSIONS = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
_NUMBER = re.compile(rb"\s*[+-]?[0-9]+\s*")
_LABELS = ("cls", "class", "label", "index")


class SampleRecord:
    """The image and label of a shard's sample, given its files by extension.

    `entries` returns the entries of the image's bytes, or None (see `penstock.images.entries`). Raises `ImageError` if
    the sample has no image.
    """

    row: int = -1
    entries: Callable[[bytes], bytes | None] | None = None

    def __init__(self, sample: dict[str, Any], entries: Callable[[bytes], bytes | None] | None = None) -> None:
        where = f"{shown(str(sample.get('__url__'))).removesuffix('?...')}/{sample.get('__key__')}"
        name = next((name for name in sample if is_image(f".{name}")), None)
        if name is None:
            raise ImageError(f"{where}: the sample has no image: {', '.join(sample)}")
        self.path = f"{where}.{name}"
        self.sample = sample
        self.entries = entries
        self._data = sample[name]
        label = next((sample[name] for name in _LABELS if name in sample), None)
        self.label = int(label) if isinstance(label, bytes) and _NUMBER.fullmatch(label) else label

    def __repr__(self) -> str:
        return f"<{self.path}>"

    def read(self) -> Any:
        """Return the bytes of the image."""
        return self._data


class ColumnRecord(SampleRecord):
    """A row of a table or an MDS folder as a record: its encoded image and its label.

    `name` is the file and row, for messages; `sample` has the columns, those of a table without the image; `label` is
    the label's column. Raises `ImageError` if the row has no image.
    """

    def __init__(self, data: bytes | None, name: str, sample: dict[str, Any], label: str | None, row: int) -> None:
        if data is None:
            raise ImageError(f"{name}: a row without an image")
        self.path, self.sample, self.row = name, sample, row
        self._data = data
        self.label = None if label is None else sample[label]


def is_image(name: str) -> bool:
    """Return whether a file name has the extension of an image.

    >>> is_image("class/1.JPEG"), is_image("notes.txt")
    (True, False)
    """
    return name.lower().endswith(EXTENSIONS)


def check_image_type(images: str) -> None:
    """Raise `ConfigError` unless `images` is an `ImageType`."""
    if images not in get_args(ImageType):
        raise ConfigError(f"unknown images={images!r}: use one of {', '.join(map(repr, get_args(ImageType)))}")


def label_column(where: str, columns: Iterable[str], image: str) -> str | None:
    """Return the column of the labels of images: the only other column, or ``label``, ``class`` or ``cls``; None if
    there is no other.

    `where` is the table, for messages. Raises `ConfigError` if several columns may be the label.
    """
    others = [name for name in columns if name != image]
    if len(others) < 2:
        return others[0] if others else None
    for name in ("label", "class", "cls"):
        if name in others:
            return name
    raise ConfigError(
        f"{where}: which of {', '.join(others)} is the label? Give columns= with only the image and the label"
    )
