"""Create the dataset of a source whose kind is known."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError, StorageNotFoundError
from penstock.opening.kinds import SourceKind, display_names
from penstock.opening.options import ACCEPTED, IMAGES, OF_IMAGES

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from penstock.datasets import ImageDataset

__all__ = ["make_dataset"]

_OF_MANIFEST = ACCEPTED["manifests"] - ACCEPTED["a folder of images"] | {"progress"}


def make_dataset(found: SourceKind, options: dict[str, Any]) -> Dataset[Any]:
    """Return the dataset of a source, wrapped in an `ImageDataset` if any option in `IMAGES` is given."""
    how = {name: options.pop(name) for name in IMAGES & options.keys()} if found.kind in OF_IMAGES else {}
    return _images(found, options, how) if how else _MAKERS[found.kind](found, options)


def _images(found: SourceKind, options: dict[str, Any], how: dict[str, Any]) -> ImageDataset:
    from penstock.datasets import ImageDataset

    if found.kind == "shards" and how.get("row"):
        raise ConfigError(
            f"{display_names(found.names)}: row= needs row numbers, but samples of shards have keys: leave row= out"
        )
    if found.kind == "MDS folders":
        options["images"] = "bytes"
    source: Any = _MAKERS[found.kind](found, options)
    if found.kind == "tables":
        _check_columns(source.table, found, how)
    return ImageDataset(source, **how)


def _check_columns(table: Any, found: SourceKind, how: Collection[str]) -> None:
    """Raise ConfigError now, not at the first batch, for a table without an image column, or with an unclear label
    column.
    """
    from penstock.tables.image_columns import label_column

    if not getattr(table, "image_columns", None):
        columns, options = ", ".join(table.columns), ", ".join(f"{name}=" for name in how)
        raise ConfigError(
            f"{display_names(found.names)}: {options} decode images, but these tables have no image column. The "
            f"columns are {columns}. An image column has the type Image of `datasets`, or is a struct of bytes and "
            f"path. Leave {options} out, and give load= to decode the images yourself"
        )
    label_column(table.columns, table.image_columns[0])


def _listed(found: SourceKind, options: dict[str, Any]) -> Dataset[Any]:
    from penstock.datasets import LoadArray, RankDataset
    from penstock.manifest import Manifest

    assert found.listed is not None
    if found.kind == "a folder of arrays":
        options = {"load": LoadArray(), **options}
    return RankDataset(Manifest.open(**found.listed), **options)


def _manifests(found: SourceKind, options: dict[str, Any]) -> Dataset[Any]:
    from penstock.datasets import RankDataset
    from penstock.manifest import Manifest

    how = {name: options.pop(name) for name in _OF_MANIFEST & options.keys()}
    return RankDataset(Manifest.open(found.names, **how), **options)


def _tables(found: SourceKind, options: dict[str, Any]) -> Dataset[Any]:
    from penstock.datasets import TableDataset

    return TableDataset(found.names, **options)


def _shards(found: SourceKind, options: dict[str, Any]) -> Dataset[Any]:
    from penstock.datasets import ShardDataset

    return ShardDataset(found.names, **options)


def _streams(found: SourceKind, options: dict[str, Any]) -> Dataset[Any]:
    from penstock.shards import StreamShards

    return StreamShards(found.names, **options)


def _mds(found: SourceKind, options: dict[str, Any]) -> Dataset[Any]:
    from penstock.datasets import MDSDataset

    if len(found.names) > 1:
        raise ConfigError(
            f"{display_names(found.names)}: several MDS folders; open them one by one, and combine them in a Mixture"
        )
    try:
        return MDSDataset(found.names[0], **options)
    except StorageNotFoundError as error:
        raise StorageNotFoundError(
            f"{display_names(found.names)}: an address without a file extension is opened as an MDS folder, but it has "
            "no index.json. Folders with one subfolder of images per class must be on a local disk. For images in a "
            "store give a list of their paths, ps.open('train.txt', root=..., size=...), or shards. LeRobot datasets "
            f"must be in a local folder ({error})"
        ) from error


def _lerobot(found: SourceKind, options: dict[str, Any]) -> Dataset[Any]:
    from penstock.datasets import LeRobotDataset

    return LeRobotDataset(found.names[0], **options)


def _arrays(found: SourceKind, options: dict[str, Any]) -> Dataset[Any]:
    from penstock.datasets import ArrayDataset

    return ArrayDataset(found.names, **options)


def _tokens(found: SourceKind, options: dict[str, Any]) -> Dataset[Any]:
    from penstock.datasets import TokenDataset

    return TokenDataset(found.names, **options)


def _documents(found: SourceKind, options: dict[str, Any]) -> Dataset[Any]:
    from penstock.datasets import DocumentDataset

    return DocumentDataset(found.names, **options)


def _videos(found: SourceKind, options: dict[str, Any]) -> Dataset[Any]:
    from penstock.datasets import VideoDataset

    return VideoDataset(_folder_or_files(found.names), **options)


def _recordings(found: SourceKind, options: dict[str, Any]) -> Dataset[Any]:
    from penstock.datasets import AudioDataset

    return AudioDataset(_folder_or_files(found.names), **options)


def _folder_or_files(names: list[str]) -> str | list[str]:
    return names[0] if len(names) == 1 else names


_MAKERS = {
    "LeRobot folders": _lerobot,
    "MDS folders": _mds,
    "a folder of arrays": _listed,
    "a folder of images": _listed,
    "arrays": _arrays,
    "compressed shards": _streams,
    "documents": _documents,
    "manifests": _manifests,
    "recordings": _recordings,
    "shards": _shards,
    "tables": _tables,
    "tokens": _tokens,
    "videos": _videos,
}
