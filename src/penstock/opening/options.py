"""The options of `penstock.open` by kind of source: as types for editors, and as names for the check at run time.

`tests/opening/test_options.py` compares them with the signatures of the classes that receive them.
"""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Required, TypedDict

from torch.utils.data import DataLoader

from penstock.errors import ConfigError
from penstock.plan.share_options import NO_NODES, NO_PRELOAD, ShareOptions, wrong_share_option

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch.distributed as dist

    from penstock.images.transforms import Compose
    from penstock.manifest.options import Blank, Columns, Header
    from penstock.shards.grouping import Handler, Sample
    from penstock.storage import Cache, Storage
    from penstock.storage.names import Name, Urls

    Decode = bool | Mapping[str, Callable[[bytes], Any] | None] | Callable[[Sample], Sample] | None

__all__ = [
    "ACCEPTED",
    "IMAGES",
    "OF_IMAGES",
    "READS_MANIFESTS",
    "ArrayOptions",
    "AudioOptions",
    "DocumentOptions",
    "FolderOptions",
    "ImageOptions",
    "LeRobotOptions",
    "MDSOptions",
    "ManifestOptions",
    "ShardOptions",
    "SharedOptions",
    "StreamOptions",
    "TableOptions",
    "TokenOptions",
    "VideoOptions",
    "check_options",
    "check_types",
]


class SharedOptions(ShareOptions, total=False):
    """Options that several kinds of source take, so they do not identify the kind."""

    load: Callable[[Any], Any] | None
    storage: Storage | None
    cache_dir: Any
    progress: bool | None
    columns: Columns
    split: str | None
    images: str | None
    decode: Decode
    window_shards: int


class FolderOptions(ShareOptions, total=False):
    """Options of a folder of images or arrays: see `penstock.RankDataset`."""

    load: Callable[[Any], Any] | None
    progress: bool | None


class ManifestOptions(FolderOptions, total=False):
    """Options of text, CSV, JSONL, Parquet or Arrow files with the paths of samples: see `penstock.Manifest.open`."""

    format: str
    root: Name | None
    columns: Columns
    label: str | None
    cache_dir: Name | None
    header: Header
    blank: Blank
    comment: str | None
    classes: Sequence[str] | None
    storage: Storage | None


class ShardOptions(ShareOptions, total=False):
    """Options of tar shards: see `penstock.ShardDataset`."""

    decode: Decode
    load: Callable[[Sample], Any] | None
    copy: bool
    storage: Storage | None
    cache_dir: str | os.PathLike[str] | None
    progress: bool | None
    window_shards: int
    write_index: bool


class StreamOptions(TypedDict, total=False):
    """Options of compressed tar shards: see `penstock.StreamShards`."""

    shuffle: str
    buffer_bytes: int
    decode: Decode
    load: Callable[[Sample], Any] | None
    seed: int
    handler: Handler | None
    storage: Storage | None
    rank: int | None
    world_size: int | None
    process_group: dist.ProcessGroup | None
    mesh: dist.device_mesh.DeviceMesh | None


class MDSOptions(ShareOptions, total=False):
    """Options of MDS folders: see `penstock.MDSDataset`."""

    split: str | None
    columns: Sequence[str] | None
    images: str | None
    allow_pickle: bool | None
    validate_hash: str | None
    cache_dir: Cache | str | os.PathLike[str] | None
    storage: Storage | None
    load: Callable[[dict[str, Any]], Any] | None


class TableOptions(ShareOptions, total=False):
    """Options of Arrow and Parquet files that contain the samples: see `penstock.TableDataset`."""

    split: str | None
    columns: Sequence[str] | None
    images: str | None
    images_from: str | os.PathLike[str] | None
    cache_bytes: int | None
    storage: Storage | None
    window_shards: int
    load: Callable[[dict[str, Any]], Any] | None


class ArrayOptions(ShareOptions, total=False):
    """Options of rows of NumPy files: see `penstock.ArrayDataset`."""

    labels: Urls | None
    load: Callable[[Any], Any] | None
    storage: Storage | None


class TokenOptions(ShareOptions, total=False):
    """Options of token files: see `penstock.TokenDataset`."""

    sequence_length: Required[int]
    dtype: npt.DTypeLike | None
    stride: int | None
    end_token: int | None
    pad_token: int
    token_type: str
    load: Callable[[Any], Any] | None
    storage: Storage | None


class DocumentOptions(ShareOptions, total=False):
    """Options of tokenized documents: see `penstock.DocumentDataset`."""

    dtype: npt.DTypeLike | None
    end_token: int | None
    token_type: str
    load: Callable[[Any], Any] | None
    storage: Storage | None


class ClipOptions(ShareOptions, total=False):
    """The common options of video and audio clips."""

    random_start: bool | None
    clips: Any
    labels: Sequence[Any] | None
    index: str | os.PathLike[str] | None
    storage: Storage | None
    progress: bool | None


class VideoOptions(ClipOptions, total=False):
    """Options of videos: see `penstock.VideoDataset`."""

    frames: int
    step: int
    stride: int | None
    size: int | tuple[int, int] | None
    flip: bool
    transform: Compose | Sequence[Callable[..., Any]] | Callable[..., Any] | None
    max_pixels: int | None


class AudioOptions(ClipOptions, total=False):
    """Options of audio recordings: see `penstock.AudioDataset`."""

    seconds: float | None
    sample_rate: int | None
    channels: int | None
    stride: float | None
    transform: Callable[..., Any] | None


class LeRobotOptions(ShareOptions, total=False):
    """Options of LeRobot datasets: see `penstock.LeRobotDataset`."""

    episodes: Sequence[int] | None
    columns: Sequence[str] | None
    delta_timestamps: Mapping[str, Sequence[float]] | None
    tolerance_s: float
    size: int | tuple[int, int] | None
    transform: Compose | Sequence[Callable[..., Any]] | Callable[..., Any] | None
    max_pixels: int | None
    index: str | os.PathLike[str] | None
    cache_bytes: int | None
    progress: bool | None


class ImageOptions(ShareOptions, total=False):
    """Options of decoded images (see `penstock.LoadImage`), and of their source."""

    size: int | tuple[int, int] | None
    flip: bool
    row: bool
    transform: Compose | Sequence[Callable[..., Any]] | Callable[..., Any] | None
    target: Callable[[Any], dict[str, Any]] | None
    max_pixels: int
    index: Name | bool | None
    format: str
    root: Name | None
    columns: Columns
    label: str | None
    header: Header
    blank: Blank
    comment: str | None
    classes: Sequence[str] | None
    progress: bool | None
    storage: Storage | None
    cache_dir: Any
    split: str | None
    copy: bool
    window_shards: int
    write_index: bool
    images_from: str | os.PathLike[str] | None
    cache_bytes: int | None
    allow_pickle: bool | None
    validate_hash: str | None


def _names(options: Any) -> frozenset[str]:
    return frozenset(options.__required_keys__ | options.__optional_keys__)


ACCEPTED: dict[str, frozenset[str]] = {
    "LeRobot folders": _names(LeRobotOptions),
    "MDS folders": _names(MDSOptions),
    "a folder of arrays": _names(FolderOptions),
    "a folder of images": _names(FolderOptions),
    "arrays": _names(ArrayOptions),
    "compressed shards": _names(StreamOptions),
    "documents": _names(DocumentOptions),
    "manifests": _names(ManifestOptions),
    "recordings": _names(AudioOptions),
    "shards": _names(ShardOptions),
    "tables": _names(TableOptions),
    "tokens": _names(TokenOptions),
    "videos": _names(VideoOptions),
}
"""The options of each kind of source; the kinds in `OF_IMAGES` also take the options in `IMAGES`."""
IMAGES = frozenset({"size", "flip", "row", "transform", "target", "max_pixels", "index"})
"""The options that decode images. With any of them, a source of a kind in `OF_IMAGES` becomes an `ImageDataset`."""
OF_IMAGES = ("a folder of images", "manifests", "shards", "MDS folders", "tables")
"""The kinds of source that can contain images."""
READS_MANIFESTS = frozenset(
    {"label", "format", "header", "blank", "comment", "classes", "cache_dir", "progress", "root"}
)
"""The options that make a table a manifest."""

_ITEMS = ("load", "decode", "images")
_PATH = (str, os.PathLike)
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "split": ((str,), "the name of a split, such as 'train'"),
    **dict.fromkeys(("root", "images_from"), (_PATH, "a folder or an address, as str or Path")),
    "format": ((str,), "the name of a format, such as 'csv', or 'auto'"),
    "label": ((str,), "a type such as 'int' or 'float', or None"),
    "comment": ((str,), "the characters that start a comment, such as '#'"),
    "images": ((str,), "'rgb', 'pil' or 'bytes'"),
    "validate_hash": ((str,), "the name of a hash, such as 'xxh64'"),
    "token_type": ((str,), "an integer dtype, such as 'int64'"),
    **dict.fromkeys(("sequence_length", "end_token", "pad_token"), ((Integral,), "an integer")),
    "stride": ((Real,), "an integer, or for audio a number of seconds"),
    "max_pixels": ((Integral,), "a number of pixels"),
    "window_shards": ((Integral,), "a number of shards or files"),
    "index": ((*_PATH, bool), "the path of an index of entries, True or 'learn'"),
    **dict.fromkeys(("cache_bytes", "buffer_bytes"), ((Integral,), "a number of bytes")),
    **dict.fromkeys(("flip", "row", "copy", "write_index", "allow_pickle", "progress"), ((bool,), "True or False")),
    "columns": ((list, tuple, Mapping), "a list of names, or a mapping of them"),
    "classes": ((list, tuple), "a list of names"),
}
"""Options other than `ShareOptions`: their types, and a description for errors. None always means the default."""
_FUNCTIONS = ("load", "target", "handler")


def check_types(options: Mapping[str, Any]) -> None:
    """Check the types of options, before they cause confusing errors elsewhere.

    Raises:
        ConfigError: an option has the wrong type.
    """
    for name, (kinds, what) in _TYPES.items():
        value = options.get(name)
        if value is not None and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
            raise ConfigError(f"{name}= takes {what}, got {value!r}")
    for name, value in options.items():
        if value is not None and (wanted := wrong_share_option(name, value)) is not None:
            raise ConfigError(f"{name}= takes {wanted}, got {value!r}")
    for name in _FUNCTIONS:
        value = options.get(name)
        if value is not None and not callable(value) and not (name == "handler" and isinstance(value, bool)):
            raise ConfigError(f"{name}= takes a function, got {value!r}")
    _check_storage(options.get("storage"))
    _check_folder(options.get("cache_dir"))


def _check_storage(value: Any) -> None:
    if value is not None:
        from penstock.storage import Storage

        if not isinstance(value, Storage):
            raise ConfigError(
                "storage= takes a penstock.storage.Storage, such as Storage(options={'anon': True}), got " + repr(value)
            )


def _check_folder(value: Any) -> None:
    if value is not None and not isinstance(value, _PATH):
        from penstock.storage import Cache

        if not isinstance(value, Cache):
            raise ConfigError(f"cache_dir= takes a folder, as str or Path, got {value!r}")


def check_options(kind: str, source: str, options: Mapping[str, Any]) -> None:
    """Raise ConfigError for an option that this kind of source does not take.

    Args:
        kind: the kind of the source.
        source: the name of the source in messages.
        options: the options of `open`.

    Raises:
        ConfigError: names the option, the kinds that take it, and the options of this kind.
    """
    given = sorted(options.keys() & IMAGES)
    if given and kind in OF_IMAGES:
        for name in _ITEMS:
            if options.get(name) is not None and name in ACCEPTED[kind]:
                raise ConfigError(
                    f"{source}: {name}= and {given[0]}= both define how images are decoded: give one of them"
                )
    if kind == "arrays":
        _check_files_of_labels(options.get("labels"))
    if "nodes" in options:
        raise ConfigError(f"{source}: {NO_NODES}")
    if "preload" in options:
        raise ConfigError(f"{source}: {NO_PRELOAD}")
    accepted = ACCEPTED[kind] | (IMAGES if kind in OF_IMAGES else set())
    for name in options:
        if name not in accepted:
            raise ConfigError(f"{source}: {_phrase(kind)} do not take {name}=: {_instead(kind, name, accepted)}")


def _check_files_of_labels(labels: Any) -> None:
    wanted = "labels= takes files, as str, Path or a list of these"
    if labels is not None and not isinstance(labels, (*_PATH, list, tuple)):
        raise ConfigError(f"{wanted}, got {labels!r}")
    for label in labels if isinstance(labels, list | tuple) else ():
        if not isinstance(label, _PATH):
            raise ConfigError(f"{wanted}, got a list that contains {label!r}")


def _instead(kind: str, name: str, accepted: frozenset[str]) -> str:
    """Return suggestions for an option that this kind does not take, and the options that it takes."""
    hints = []
    if name in IMAGES - {"index"} and kind == "compressed shards":
        hints.append(f"they are a stream: give load=penstock.LoadImage({name}=...)")
    elif name in IMAGES:
        hints.append(f"it is for {_listing(map(_phrase, OF_IMAGES))}")
    elif others := [_phrase(other) for other, names in ACCEPTED.items() if name in names]:
        hints.append(f"it is for {_listing(others)}")
    if name in _OF_LOADERS:
        hints.append("it is for the DataLoader")
    elif near := difflib.get_close_matches(name, accepted, 1):
        several = ", a list of names" if near[0] == "columns" else ""
        hints.append(f"did you mean {near[0]}={several}?")
    own, shared = sorted(accepted - _names(ShareOptions)), sorted(accepted & _names(ShareOptions))
    return "; ".join([*hints, f"they take {', '.join([*own, *shared])}"])


_OF_LOADERS = inspect.signature(DataLoader).parameters.keys() - {"dataset", "shuffle"}
"""Options of torch's DataLoader, which users may give here by mistake."""

_PHRASES = {
    "a folder of arrays": "folders of arrays",
    "a folder of images": "folders of images",
    "arrays": "rows of NumPy files",
    "documents": "tokenized documents",
    "shards": "tar shards",
    "tokens": "token files",
}


def _phrase(kind: str) -> str:
    return _PHRASES.get(kind, kind)


def _listing(names: Any) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else str(last)
