"""The kinds of sources: how to identify one by name and contents, and the constructor, options and checks of each.

Options are the parameters of the constructors, read from their signatures when a source is opened.
"""

from __future__ import annotations

import difflib
import inspect
import os
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from types import NoneType, UnionType
from typing import Any, Literal, SupportsIndex, Union, get_args, get_origin, get_type_hints

import penstock
from penstock.clips.discovery import LEROBOT_INFO, SOUND_ENDINGS, VIDEO_ENDINGS, is_lerobot_folder
from penstock.errors import ConfigError, DataFileError, StorageNotFoundError
from penstock.images.sample_record import is_image
from penstock.manifest import Manifest
from penstock.manifest.formats.base import EXTENSIONS, format_of
from penstock.plan.share_options import NO_PRELOAD, ShareOptions, check_share
from penstock.sources.file_list import list_arrays, list_images
from penstock.storage import Cache, File, Storage, local_path
from penstock.storage.names import expand, without_query
from penstock.storage.urls import path_of, scheme, shown
from penstock.tables.found_files import DESCRIPTIONS, ENDINGS_IN_FOLDERS, JSON_ENDINGS, delimiter_of
from penstock.tokens.folder import INDEX, NAME, TokenFolder
from penstock.tokens.megatron import is_index
from penstock.wording import counted

__all__ = [
    *("DATASETS", "OF_IMAGES", "SourceKind", "check_options", "constructors_of", "folder_manifest", "identify"),
    *("image_options", "kind_of", "make_dataset", "options_of", "parameters", "shards_in"),
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
OF_IMAGES = ("a folder of images", "manifests", "shards", "MDS folders", "tables", "arrays")
"""The kinds of source that can contain images. With any of `image_options`, they become an `ImageDataset`."""

_TAR = (".tar",)
_COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
_TOKENS = (".bin", ".npy")
_MANIFESTS = (".txt", ".list", ".lst", ".text", *EXTENSIONS)
_ENDINGS = {
    "shards": _TAR,
    "compressed shards": _COMPRESSED,
    "arrays": (".npy",),
    "manifests": _MANIFESTS,
    "tables": JSON_ENDINGS,
    "videos": VIDEO_ENDINGS,
    "recordings": SOUND_ENDINGS,
}
_SPLITS = {"train", "training", "val", "valid", "validation", "dev", "test", "testing"}
_SHOWN, _MOST = 3, 10_000  # names and entries of a folder in an error message

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


@dataclass(frozen=True)
class SourceKind:
    """The kind of a source, and its files.

    Attributes:
        kind: "manifests", "shards", "tables", "documents", "a folder of images" ...
        names: the files, or the folder; for a folder of shards or tokens, the files in it.
        listed: for a folder of images or arrays, the arguments of `Manifest.open` for the list of its files.
    """

    kind: str
    names: list[str]
    listed: dict[str, Any] | None = None

    def __str__(self) -> str:
        return _display_names(self.names)


def kind_of(source: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], **options: Any) -> str:
    """Return the kind that `open` identifies for a source: "manifests", "shards", "tables", "a folder of images" ...

    Raises:
        ConfigError: the kind is unknown.
    """
    return identify(expand(source, options.get("storage")), options).kind


def folder_manifest(path: str) -> dict[str, Any] | None:
    """Return the arguments of `Manifest.open` for a folder of images by class, or of ``.npy`` files; else None."""
    return list_images(path) or list_arrays(path)


def shards_in(path: str, endings: tuple[str, ...] = _TAR) -> list[str]:
    """Return the shards in a folder, sorted, without hidden files, which are incomplete or belong to the operating
    system.
    """
    entries = (entry for entry in os.scandir(path) if not entry.name.startswith("."))
    return sorted(entry.path for entry in entries if entry.name.endswith(endings) and entry.is_file())


def identify(names: list[str], options: Mapping[str, Any]) -> SourceKind:
    """Return the kind and the files of a source.

    Args:
        names: the source, expanded.
        options: the options of `open`.

    Raises:
        ConfigError: the kind is unknown, there are several kinds, or an option has the wrong type.
    """
    for name, hint in {"split": str, "storage": Storage, "columns": Sequence[Any] | Mapping[str, Any]}.items():
        check_option(name, options.get(name), hint)
    if len(names) == 1 and (path := path_of(names[0])) is not None and os.path.isdir(path):
        return _folder(path, options)
    kinds = {_kind_of_tokens(name, options) or _kind(name) for name in names}
    if "manifests" in kinds and kinds <= {"manifests", "tables"}:
        kinds = {"tables"} if _hold_samples([name for name in names if _kind(name) == "manifests"], options) else kinds
    if len(kinds) > 1:
        raise ConfigError(f"{_display_names(names)}: {' and '.join(sorted(kinds))} in one source; open them one by one")
    return SourceKind(kinds.pop(), names)


def _display_names(names: list[str]) -> str:
    """Return the names of a source for error messages."""
    return ", ".join(map(shown, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _kind_of_tokens(name: str, options: Mapping[str, Any]) -> str | None:
    """Return the kind of a token file, identified by the options or by an index beside it; None for all other files."""
    if "sequence_length" in options:
        return "tokens"
    if name.endswith(_TOKENS) and options.get("end_token") is not None:
        return "documents"
    path = path_of(name)
    if path is None:
        ours = name.endswith((f"/{NAME}", ".idx"))
    else:
        ours = os.path.basename(path) == NAME or (
            path.endswith((".bin", ".idx")) and is_index(f"{path[: -len('.bin')]}.idx")
        )
    return "documents" if ours else None


def _kind(name: str) -> str:
    lower = without_query(name).lower()
    if scheme(name).startswith("grpc"):
        raise ConfigError(
            f"{shown(name)}: this is the address of a metadata server. Open it with "
            f"RankServerDataset({shown(name)!r}, ...); if the server has several datasets, add the name of one"
        )
    path = path_of(name)
    for kind, endings in _ENDINGS.items():
        if lower.endswith(endings) and not (kind in ("videos", "recordings") and path and os.path.isdir(path)):
            return kind
    # The name of a dataset on a hub may contain dots.
    if scheme(name) == "hf" and lower.count("/") <= 4:
        return "tables"
    if path is None and "." not in lower.rpartition("/")[2]:
        return "tables" if scheme(name) == "hf" else "MDS folders"
    if path is not None and not os.path.exists(path):
        if is_index(f"{path}.idx"):
            return "documents"
        where = "" if os.path.isabs(path) else f" in {os.getcwd()}"
        where = " ('~' is not expanded: give the full path)" if path.startswith("~") else where
        raise ConfigError(f"{shown(name)}: there is no such file or folder{where}")
    if path is not None and os.path.isdir(path):
        raise ConfigError(f"{shown(name)}: this is a folder among several sources; open folders one by one")
    if is_image(lower):
        raise ConfigError(
            f"{shown(name)}: this is a single image. Give a folder with one subfolder of images per class, or a list "
            "with a line `path label` for each image"
        )
    raise ConfigError(
        f"{shown(name)}: unknown kind of data. Known are a manifest or table ({', '.join(_MANIFESTS)}, "
        ".jsonl.zst, .jsonl.gz), tar shards (.tar, .tar.gz, .tgz, "
        "...), NumPy files (.npy), videos and recordings (.mp4, .mkv, .flac, .wav, ...), an MDS folder (with "
        "index.json), and a folder with one subfolder of images per class. For a manifest with another name use "
        "Manifest.open(..., format='text'); for token files give dtype=, and sequence_length= or end_token="
    )


def _hold_samples(names: list[str], options: Mapping[str, Any]) -> bool:
    """Return whether tables contain the samples themselves.

    They do if they have no columns of paths and labels, and no option says to read them as a manifest.
    """
    name = names[0]
    kind = format_of(without_query(name))
    of_manifests = parameters(Manifest.open).keys() - {"columns", "storage"}  # tables have these two, as well
    if kind == "text" or options.keys() & of_manifests:
        return False
    if scheme(name) == "hf":
        return True
    wanted = options.get("columns")
    if wanted is not None:
        return not isinstance(wanted, Mapping) and "path" not in {str(column).partition(":")[0] for column in wanted}
    if kind == "jsonl":
        return not {"path", "label"} <= _first_keys(names, options.get("storage"))
    if (delimiter := delimiter_of(name)) is not None:
        from penstock.tables.csv import holds_samples

        # Tables of CSV have no images, so options for images are for a list of their paths.
        path = path_of(name) or local_path(name, storage=options.get("storage"))
        return not options.keys() & image_options() and holds_samples(File(path), delimiter)
    from penstock.tables.table import read_schema

    return not {"path", "label"} <= set(read_schema(name, options.get("storage")).names)


def _first_keys(names: list[str], storage: Storage | None) -> set[str]:
    """Return the keys of the first row of JSON lines files.

    For a missing file, return the keys of a manifest, because `Manifest.open` then raises the error.
    """
    from penstock.tables.json_files import first_keys

    for name in names:
        path = path_of(name)
        if path is not None and not os.path.isfile(path):
            return {"path", "label"}
        keys = first_keys(name, storage)
        if keys is not None:
            return keys
    return set()


def _folder(path: str, options: Mapping[str, Any]) -> SourceKind:
    names = set(os.listdir(path))
    if os.path.exists(os.path.join(path, options.get("split") or "", "index.json")):
        return SourceKind("MDS folders", [path])
    if "meta" in names and is_lerobot_folder(path):
        return SourceKind("LeRobot folders", [path])
    shards, compressed = shards_in(path), shards_in(path, _COMPRESSED)
    if shards and compressed:
        raise ConfigError(
            f"{path}: the folder has both plain and compressed shards ({os.path.basename(compressed[0])}); give one "
            f"kind, such as {os.path.join(path, '*.tar')!r}"
        )
    if shards or compressed:
        return SourceKind("shards" if shards else "compressed shards", shards or compressed)
    if NAME in names:
        if "sequence_length" not in options:
            return SourceKind("documents", [path])
        whole = TokenFolder.whole(os.path.join(path, NAME))
        return SourceKind("tokens", [os.path.join(path, f"{each.name}.bin") for each in whole.shards])
    _check_indexes(path, names)
    if "sequence_length" in options and (files := shards_in(path, _TOKENS)):
        return SourceKind("tokens", files)
    data = os.path.join(path, "data")
    in_data = os.listdir(data) if os.path.isdir(data) else []
    if names & DESCRIPTIONS or any(name.endswith(ENDINGS_IN_FOLDERS) for name in [*names, *in_data]):
        return SourceKind("tables", [path])
    listed = folder_manifest(path)
    if listed is None:
        if (kind := _kind_of_clips(path)) is not None:
            return SourceKind(kind, [path])
        instead = "For files of other kinds give a list of them: ps.open('train.txt', root=..., load=ps.LoadBytes())"
        if any(map(is_image, _names_in(path)[0])):
            instead = (
                "For images without class folders, give a list with a line `path label` for each image: "
                f"ps.open('train.txt', root={path!r}, size=...)"
            )
        raise ConfigError(
            f"{path}: {_describe_folder(path)}. `open` needs a folder with index.json (MDS), {NAME}, {LEROBOT_INFO} "
            "(LeRobot), *.tar, *.arrow, *.parquet, *.npy, videos or recordings, or with one subfolder of images per "
            f"class. {instead}"
        )
    classes = listed.get("classes")
    if classes is None:
        return SourceKind("a folder of arrays", [path], listed)
    are_splits = {name.lower() for name in classes} <= _SPLITS
    if are_splits and any(entry.is_dir() for name in classes for entry in os.scandir(os.path.join(path, name))):
        raise ConfigError(
            f"{path}: its subfolders {', '.join(classes)} are splits, which contain the class folders: open one split, "
            f"such as {os.path.join(path, classes[0])!r}"
        )
    return SourceKind("a folder of images", [path], listed)


def _check_indexes(folder: str, names: set[str]) -> None:
    """Raise DataFileError if a folder without ``tokens.json`` holds indexes of documents, which pass for arrays."""
    ending = INDEX["penstock"]
    for name in sorted(name for name in names if name.endswith(ending)):
        stem = name.removesuffix(ending)
        if f"{stem}.bin" in names or re.fullmatch(r"tokens-\d{5,}", stem):
            raise DataFileError(
                f"{folder} has tokens of `penstock tokenize` ({name} is an index of documents), and no {NAME}, which "
                "says what they are: copy it, too, or tokenize into an empty folder again"
            )


def _kind_of_clips(path: str) -> str | None:
    """Return "videos" or "recordings" for a folder with such files, by its first subfolder with any; else None."""
    for _, folders, names in os.walk(path, followlinks=True):
        folders.sort()
        for kind, endings in (("videos", VIDEO_ENDINGS), ("recordings", SOUND_ENDINGS)):
            if any(name.lower().endswith(endings) for name in names):
                return kind
    return None


def _describe_folder(path: str) -> str:
    """Return the contents of a folder in words: "2 folders (a, b), in which there are 7 .txt files"."""
    files, folders = _names_in(path)
    parts = _count_kinds(files)
    if folders:
        names = ", ".join(folders[:_SHOWN]) + (", ..." if len(folders) > _SHOWN else "")
        parts.insert(0, f"{counted(len(folders), 'folder')} ({names})")
    found = f"a folder with {' and '.join(parts)}" if parts else "an empty folder"
    inside = [name for folder in folders[:_SHOWN] for name in _names_in(os.path.join(path, folder))[0]]
    if inside:
        return f"{found}, in which there are {' and '.join(_count_kinds(inside))}"
    return f"{found}, in which there are no files" if folders else found


def _names_in(path: str) -> tuple[list[str], list[str]]:
    """Return the names of files and of folders in a folder, of not so many that an error message takes long."""
    with os.scandir(path) as entries:
        found = [(entry.name, entry.is_dir()) for entry in islice(entries, _MOST) if not entry.name.startswith(".")]
    return sorted(name for name, is_dir in found if not is_dir), sorted(name for name, is_dir in found if is_dir)


def _count_kinds(files: list[str]) -> list[str]:
    kinds = Counter(os.path.splitext(name)[1].lower() for name in files)
    common = [counted(count, f"{kind} file" if kind else "file") for kind, count in kinds.most_common(_SHOWN)]
    return [*common, "others"] if len(kinds) > _SHOWN else common


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
            raise ConfigError(f"{found}: {_phrase(kind)} do not take {name}=: {_suggestions(kind, name, accepted)}")
        check_option(name, value, accepted[name])


def _suggestions(kind: str, name: str, accepted: Mapping[str, Any]) -> str:
    """Return suggestions for an option that a source does not take, and the options that it takes."""
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
