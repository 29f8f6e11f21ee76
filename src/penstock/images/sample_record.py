"""`SampleRecord`: wraps a sample of a shard, which is a dict, as the record of an image."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from penstock.errors import ImageError
from penstock.images.files import is_image
from penstock.storage.urls import shown

__all__ = ["SampleRecord"]

_NUMBER = re.compile(rb"\s*[+-]?[0-9]+\s*")
_LABELS = ("cls", "class", "label", "index")


class SampleRecord:
    """The image and label of a shard's sample.

    Args:
        sample: the sample's files by extension.
        entries: returns the entries of the image's bytes, or None (see `penstock.images.entries`).

    Raises:
        ImageError: (by the constructor) the sample has no image.
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
