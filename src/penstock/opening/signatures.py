"""`open`, with a signature for each kind of source: editors complete options, type checkers know the result."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Unpack, overload

from penstock.opening.kinds import look_at, said
from penstock.opening.makers import make
from penstock.opening.options import check_options
from penstock.shards.urls import expand

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


# The first signature has the options that several kinds take: they do not tell which one it is.
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
# Its options are those of a source and of `LoadImage`: only with one of these nothing before it fits.
@overload
def open(source: Source, **options: Unpack[ImageOptions]) -> ImageDataset: ...
@overload
def open(source: Source, **options: Unpack[VideoOptions]) -> VideoDataset: ...
@overload
def open(source: Source, **options: Unpack[AudioOptions]) -> AudioDataset: ...
@overload
def open(source: Source, **options: Unpack[LeRobotOptions]) -> LeRobotDataset: ...
def open(source: Source, **options: Any) -> Any:
    """Return the data set for a source, by its name and by what is there.

    Args:
        source: a path or an address; see above. Shards, manifests and the like may be several (a list, braces,
            patterns, ``::``).
        options: of that data set; of a manifest also those of `Manifest.open`. Where the source holds images, any
            option of `LoadImage` (``size``, ``transform``, ``flip``, ``target``, ``row``, ``max_pixels``,
            ``index``) makes an `ImageDataset`: items are ``(image, label)``, and ``dataset.classes[label]`` is the name
            of the class where the source says it. ``size=None`` keeps the size of each file.

    Raises:
        ConfigError: nothing that is known, or an option that this kind of source does not take. The message says what
            was looked for, and what it takes.
        PenstockError: what the data set raises.

    The labels of a folder of images, of videos or of recordings are the places of their folders in the order of their
    names; hidden folders and files of images are left out.
    """
    found = look_at(expand(source, options.get("storage")), options)
    check_options(found.kind, said(found.names), options)
    return make(found, options)
