"""`open`, with one signature per kind of source: editors complete the options, and type checkers infer the result."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Unpack, overload

from penstock.opening.kinds import display_names, identify
from penstock.opening.makers import make_dataset
from penstock.opening.options import check_options
from penstock.storage.names import expand

if TYPE_CHECKING:
    from penstock.datasets import (
        ArrayDataset,
        AudioDataset,
        DocumentDataset,
        ImageDataset,
        LeRobotDataset,
        MDSDataset,
        RankDataset,
        ShardDataset,
        TableDataset,
        TokenDataset,
        VideoDataset,
    )
    from penstock.datasets.source_dataset import SourceDataset
    from penstock.opening.options import (
        ArrayOptions,
        AudioOptions,
        DocumentOptions,
        ImageOptions,
        LeRobotOptions,
        ManifestOptions,
        MDSOptions,
        ShardOptions,
        SharedOptions,
        StreamOptions,
        TableOptions,
        TokenOptions,
        VideoOptions,
    )
    from penstock.shards import StreamShards

__all__ = ["open"]

Source = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


# The first signature has the options that several kinds take, so they do not identify the kind.
@overload
def open(source: Source, **options: Unpack[SharedOptions]) -> SourceDataset | Any: ...
@overload
def open(source: Source, **options: Unpack[ManifestOptions]) -> RankDataset: ...
@overload
def open(source: Source, **options: Unpack[ShardOptions]) -> ShardDataset: ...
@overload
def open(source: Source, **options: Unpack[StreamOptions]) -> StreamShards: ...
@overload
def open(source: Source, **options: Unpack[MDSOptions]) -> MDSDataset: ...
@overload
def open(source: Source, **options: Unpack[TableOptions]) -> TableDataset: ...
@overload
def open(source: Source, **options: Unpack[ArrayOptions]) -> ArrayDataset: ...
@overload
def open(source: Source, **options: Unpack[TokenOptions]) -> TokenDataset: ...
@overload
def open(source: Source, **options: Unpack[DocumentOptions]) -> DocumentDataset: ...
# Takes the options of a source and of `LoadImage`. Options of `LoadImage` fit no signature before this one.
@overload
def open(source: Source, **options: Unpack[ImageOptions]) -> ImageDataset: ...
@overload
def open(source: Source, **options: Unpack[VideoOptions]) -> VideoDataset: ...
@overload
def open(source: Source, **options: Unpack[AudioOptions]) -> AudioDataset: ...
@overload
def open(source: Source, **options: Unpack[LeRobotOptions]) -> LeRobotDataset: ...
def open(source: Source, **options: Any) -> Any:
    """Return the dataset for a source. The kind of dataset follows from the source's name and contents.

    Args:
        source: a path or an address; see `penstock.opening` for all kinds. For several files, such as shards or
            manifests, give a list, braces, patterns or ``::``.
        options: the options of the dataset, and for a manifest also the options of `Manifest.open`. If the source
            contains images, any option of `LoadImage` (``size``, ``transform``, ``flip``, ``target``, ``row``,
            ``max_pixels``, ``index``) returns an `ImageDataset`: items are ``(image, label)``, and
            ``dataset.classes[label]`` is the name of the class, if the source has class names. ``size=None`` keeps the
            size of each file.
            Without any of them, nothing of a folder of images is decoded: items are ``(path, label, row)``.

    Raises:
        ConfigError: the kind of source is unknown, or does not take an option. The message lists the known kinds
            or options.
        PenstockError: the errors of the dataset.

    For a folder of images, videos or recordings by class, a label is the index of the class folder in the sorted list
    of class folders. Hidden folders and hidden image files are ignored. Beside folders of images, a folder without any
    counts as a class, with a warning.
    """
    found = identify(expand(source, options.get("storage")), options)
    check_options(found.kind, display_names(found.names), options)
    return make_dataset(found, options)
