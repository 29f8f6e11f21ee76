"""`MDSImages`: the samples of MDS folders as image records.

An MDS column declares how its values are encoded. The image is the first column of encoded image files. The label is
the column called ``label``, ``class`` or ``cls``, or the only other column.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.datasets.mds import MDSDataset
from penstock.errors import ConfigError
from penstock.images.files import is_image
from penstock.images.sample_record import SampleRecord
from penstock.plan.share import MiniEpoch
from penstock.shards.mds import MDSFolder

__all__ = ["ColumnRecord", "MDSImages"]

_FILES = ("jpeg", "png")
_LABELS = ("label", "class", "cls")


class ColumnRecord(SampleRecord):
    """An MDS sample as a record: the encoded image of one column, the label of another.

    Attributes:
        sample: all columns.
    """

    def __init__(self, sample: dict[str, Any], image: str, label: str | None, where: str, row: int) -> None:
        self.path, self.sample, self.row = where, sample, row
        self._data = sample[image]
        self.label = None if label is None else sample[label]


class MDSImages:
    """The image and label columns of MDS samples, and the records of these columns.

    Args:
        source: a folder or dataset with encoded images (``images="bytes"``).

    Raises:
        ConfigError: the images are already decoded, there is no image column, or several columns may be the label.
    """

    def __init__(self, source: MDSFolder | MDSDataset) -> None:
        self.source = source
        folder = self.folder
        if folder.images != "bytes":
            raise ConfigError(f"{folder.path}: ImageDataset decodes the images itself: open it with images='bytes'")
        self.image = _image_column(folder)
        self.label = _label_column([name for name in folder.columns if name != self.image], folder.path)

    @property
    def folder(self) -> MDSFolder:
        """The samples, in the order of the shards."""
        return self.source if isinstance(self.source, MDSFolder) else self.source.folder

    def __len__(self) -> int:
        return len(self.source)

    def records(self, indices: Sequence[int], place: MiniEpoch | None = None) -> list[ColumnRecord]:
        """Return the records of several samples.

        ``place`` is the mini-epoch that the indices belong to; by default the current one.
        """
        path, source = self.folder.path, self.source
        if isinstance(source, MDSFolder):
            rows, samples = [int(index) % len(source) for index in indices], source.records(indices)
        else:
            rows, samples = source.rows(indices, place).tolist(), source.records(indices, place)
        return [
            ColumnRecord(sample, self.image, self.label, f"{path}, sample {row}", row)
            for row, sample in zip(rows, samples, strict=True)
        ]


def _image_column(folder: MDSFolder) -> str:
    for name, encoding in folder.columns.items():
        named = encoding == "bytes" and (name in ("image", "img") or is_image(f".{name}"))
        if encoding in _FILES or named:
            return name
    found = ", ".join(f"{name} ({encoding})" for name, encoding in folder.columns.items())
    raise ConfigError(
        f"{folder.path}: no column of encoded images (jpeg, png). The columns are {found}. For other encodings give "
        "load=, a function of a sample"
    )


def _label_column(others: list[str], path: str) -> str | None:
    if len(others) < 2:
        return others[0] if others else None
    for name in _LABELS:
        if name in others:
            return name
    raise ConfigError(
        f"{path}: which of {', '.join(others)} is the label? Give columns= with only the image and the label"
    )
