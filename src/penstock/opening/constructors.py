"""The constructors of each kind of source: the options that they take, the checks of these, and the call.

Options are the parameters of the constructors, read from their signatures when a source is opened.
"""

from __future__ import annotations

import difflib
import inspect
import os
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, Union, get_args, get_origin, get_type_hints

import penstock
from penstock.errors import ConfigError, StorageNotFoundError
from penstock.plan.share_options import NO_PRELOAD, ShareOptions, check_share
from penstock.storage import Cache, Storage

if TYPE_CHECKING:
    from penstock.opening.kinds import SourceKind

__all__ = [
    "DATASETS",
    "OF_IMAGES",
    "check_option",
    "check_options",
    "constructors_of",
    "image_options",
    "make_dataset",
    "options_of",
    "parameters",
]

DATASETS = {
    "LeRobot folders": "LeRobotDataset",
    "MDS folders": "MDSDataset",
    "a folder of arrays": "RankDataset",
    "a folder of images": "RankDataset",
    "arrays": "ArrayDataset",
    "compressed shards": "StreamShards",
    "documents": "DocumentDataset",
    "manifests": "RankDataset",
    "recordings": "AudioDataset",
    "shards": "ShardDataset",
    "tables": "TableDataset",
    "tokens": "TokenDataset",
    "videos": "VideoDataset",
}
"""The class of `penstock` for each kind of source."""
OF_IMAGES = ("a folder of images", "manifests", "shards", "MDS folders", "tables")
"""The kinds of source that can contain images. With any of `image_options`, they become an `ImageDataset`."""

_PHRASES = {
    "a folder of arrays": "folders of arrays",
    "a folder of images": "folders of images",
    "arrays": "rows of NumPy files",
    "documents": "tokenized documents",
    "shards": "tar shards",
    "tokens": "token files",
}

_WANTED = {
    "split": "the name of a split, such as 'train'",
    "label": "a type such as 'int' or 'float', or None",
    "comment": "the characters that start a comment, such as '#'",
    "validate_hash": "the name of a hash, such as 'xxh64'",
    "classes": "a list of names",
    **dict.fromkeys(("root", "images_from"), "a folder or an address, as str or Path"),
    **dict.fromkeys(("cache_bytes", "buffer_bytes"), "a number of bytes"),
}
_WANTED_BY_TYPE: dict[frozenset[Any], str] = {
    frozenset({bool}): "True or False",
    frozenset({int}): "an integer",
    frozenset({Callable}): "a function",
    frozenset({Sequence}): "a list",
    frozenset({Sequence, Mapping}): "a list of names, or a mapping of them",
    frozenset({str, os.PathLike, Iterable}): "files, as str, Path or a list of these",
    frozenset({str, os.PathLike}): "a path, as str or Path",
    frozenset({str, os.PathLike, Cache}): "a folder, as str or Path",
    frozenset({Storage}): "a penstock.storage.Storage, such as Storage(options={'anon': True})",
}
"""What options take, by name, or else by type. The constructors themselves check options of other types."""


def constructors_of(kind: str) -> list[Callable[..., Any]]:
    """Return what receives the options of a kind of source: the class, and for a manifest `Manifest.open`."""
    dataset = getattr(penstock, DATASETS[kind])
    return [dataset, penstock.Manifest.open] if kind == "manifests" else [dataset]


@cache
def options_of(kind: str) -> dict[str, Any]:
    """Return the options of a kind of source, with their types. The kinds in `OF_IMAGES` also take `image_options`."""
    return {name: hint for constructor in constructors_of(kind) for name, hint in parameters(constructor).items()}


@cache
def image_options() -> dict[str, Any]:
    """Return the options that decode images, with their types."""
    return {name: hint for name, hint in parameters(penstock.ImageDataset).items() if name != "storage"}


@cache
def parameters(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the parameters of a constructor after its source, with their types. Those in ``**share`` have the type
    Any, because `check_share` checks them.
    """
    if isinstance(function, type):
        function = function.__init__  # type: ignore[misc]
    # Some modules import these types for type checkers alone.
    hints = get_type_hints(function, localns={"Storage": Storage, "Compose": Any})
    named = [each for each in inspect.signature(function).parameters.values() if each.name != "self"][1:]
    found = {each.name: hints[each.name] for each in named if each.kind is not inspect.Parameter.VAR_KEYWORD}
    return found if len(found) == len(named) else found | dict.fromkeys(ShareOptions.__annotations__, Any)


def check_option(name: str, value: Any, hint: Any) -> None:
    """Raise ConfigError for a value of another type, before it causes a confusing error elsewhere.

    None always means the default. Constructors name the values of a Literal themselves.
    """
    alternatives = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kinds = frozenset(get_origin(each) or each for each in alternatives) - {NoneType}
    wanted = _WANTED.get(name) or _WANTED_BY_TYPE.get(kinds)
    if kinds == {Literal}:
        wanted = _listing([repr(one) for each in alternatives for one in get_args(each)], "or")
    if value is not None and wanted is not None and not any(_is_a(value, kind) for kind in kinds):
        raise ConfigError(f"{name}= takes {wanted}, got {reprlib.repr(value)}")


def _is_a(value: Any, kind: Any) -> bool:
    if kind is int:
        # True is an int, and arrays of several integers have __index__, too.
        return isinstance(value, SupportsIndex) and not isinstance(value, bool) and not getattr(value, "ndim", 0)
    if kind is Sequence:
        return isinstance(value, Iterable) and not isinstance(value, str | bytes)
    if kind is Iterable:
        return isinstance(value, list | tuple) and all(isinstance(item, str | os.PathLike) for item in value)
    return isinstance(value, str if kind is Literal else kind)


def check_options(found: SourceKind, options: Mapping[str, Any]) -> None:
    """Check the options of `open` for a source.

    Raises:
        ConfigError: this kind of source does not take an option, or not this value. The message names the option, the
            kinds that take it, and the options of this kind.
    """
    kind, accepted = found.kind, options_of(found.kind)
    # Few calls have options of images, whose modules take a while to import.
    if kind in OF_IMAGES and options.keys() - accepted:
        accepted = accepted | image_options()
        if decoding := sorted(options.keys() & image_options()):
            for name in ("load", "decode", "images"):
                if options.get(name) is not None and name in accepted:
                    raise ConfigError(
                        f"{found}: {name}= and {decoding[0]}= both define how images are decoded: give one of them"
                    )
    if "exclude" in accepted:
        shared = options.keys() & {*ShareOptions.__annotations__, "nodes"}
        given = {name: options[name] for name in shared if options[name] is not None}
        check_share(getattr(penstock, DATASETS[kind]), given)
    for name, value in options.items():
        if name == "preload":
            raise ConfigError(f"{found}: {NO_PRELOAD}")
        if name not in accepted:
            raise ConfigError(f"{found}: {_phrase(kind)} do not take {name}=: {_instead(kind, name, accepted)}")
        check_option(name, value, accepted[name])


def _instead(kind: str, name: str, accepted: Mapping[str, Any]) -> str:
    """Return suggestions for an option that this kind does not take, and the options that it takes."""
    from torch.utils.data import DataLoader

    hints = []
    if name in image_options().keys() - {"index"} and kind == "compressed shards":
        hints.append(f"they are a stream: give load=penstock.LoadImage({name}=...)")
    elif name in image_options():
        hints.append(f"it is for {_listing(map(_phrase, OF_IMAGES))}")
    elif others := [_phrase(other) for other in DATASETS if name in options_of(other)]:
        hints.append(f"it is for {_listing(others)}")
    if name in inspect.signature(DataLoader).parameters.keys() - {"dataset", "shuffle"}:
        hints.append("it is for the DataLoader")
    elif near := difflib.get_close_matches(name, accepted, 1):
        several = ", a list of names" if near[0] == "columns" else ""
        hints.append(f"did you mean {near[0]}={several}?")
    ordered = sorted(accepted, key=lambda option: (option in ShareOptions.__annotations__, option))
    return "; ".join([*hints, f"they take {', '.join(ordered)}"])


def _phrase(kind: str) -> str:
    return _PHRASES.get(kind, kind)


def _listing(names: Iterable[str], word: str = "and") -> str:
    *first, last = names
    return f"{', '.join(first)} {word} {last}" if first else last


def make_dataset(found: SourceKind, options: dict[str, Any]) -> Any:
    """Return the dataset of a source, in an `ImageDataset` if any of `image_options` is given. The options are checked
    already, see `check_options`.
    """
    names = found.names
    source: Any = names[0] if len(names) == 1 else names
    decoding = {name: options.pop(name) for name in options.keys() - options_of(found.kind)}
    if found.kind == "MDS folders":
        if len(names) > 1:
            raise ConfigError(f"{found}: several MDS folders; open them one by one, and combine them in a Mixture")
        options |= {"images": "bytes"} if decoding else {}
    elif found.kind == "shards" and decoding.get("row"):
        raise ConfigError(f"{found}: row= needs row numbers, but samples of shards have keys: leave row= out")
    elif found.listed is not None:
        source = penstock.Manifest.open(**found.listed)
        if found.kind == "a folder of arrays":
            options = {"load": penstock.LoadArray(), **options}
    elif found.kind == "manifests":
        reading = parameters(penstock.Manifest.open).keys() & options.keys()
        source = penstock.Manifest.open(source, **{name: options.pop(name) for name in reading})
    try:
        dataset = getattr(penstock, DATASETS[found.kind])(source, **options)
    except StorageNotFoundError as error:
        if found.kind != "MDS folders":
            raise
        raise StorageNotFoundError(
            f"{found}: an address without a file extension is opened as an MDS folder, but it has no index.json. "
            "Folders with one subfolder of images per class must be on a local disk. For images in a store give a list "
            "of their paths, ps.open('train.txt', root=..., size=...), or shards. LeRobot datasets must be in a local "
            f"folder ({error})"
        ) from error
    return penstock.ImageDataset(dataset, **decoding) if decoding else dataset
