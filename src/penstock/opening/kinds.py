"""Identify the kind of a source by its name and contents."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.clips.discovery import LEROBOT_INFO, SOUND_ENDINGS, VIDEO_ENDINGS, is_lerobot_folder
from penstock.errors import ConfigError
from penstock.images.files import is_image
from penstock.manifest import Manifest
from penstock.manifest.formats import EXTENSIONS, format_of
from penstock.opening.constructors import check_option, image_options, parameters
from penstock.opening.contents import count_images, describe_folder
from penstock.sources.file_list import list_arrays, list_images
from penstock.storage import File, Storage, local_path
from penstock.storage.names import expand, without_query
from penstock.storage.urls import path_of, scheme, shown
from penstock.tables.files import JSON_ENDINGS, delimiter_of, is_table_folder
from penstock.tokens.folder import NAME, TokenFolder, check_listed
from penstock.tokens.megatron import is_index

__all__ = ["SourceKind", "folder_manifest", "identify", "kind_of", "shards_in"]

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
    """Return the arguments of `Manifest.open` for a folder of images by class, or of ``.npy`` files; None for other
    folders.
    """
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
        raise ConfigError(f"{shown(name)}: there is no such file or folder{_where(path)}")
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
    check_listed(path, names)
    if "sequence_length" in options and (files := shards_in(path, _TOKENS)):
        return SourceKind("tokens", files)
    if is_table_folder(path):
        return SourceKind("tables", [path])
    listed = folder_manifest(path)
    if listed is None:
        if (kind := _kind_of_clips(path)) is not None:
            return SourceKind(kind, [path])
        raise ConfigError(
            f"{path}: {describe_folder(path)}. `open` needs a folder with index.json (MDS), {NAME}, {LEROBOT_INFO} "
            "(LeRobot), *.tar, *.arrow, *.parquet, *.npy, videos or recordings, or with one subfolder of images per "
            f"class.{_instead(path)}"
        )
    if "classes" in listed:
        _check_splits(path, listed["classes"])
    return SourceKind("a folder of images" if "classes" in listed else "a folder of arrays", [path], listed)


def _kind_of_clips(path: str) -> str | None:
    """Return "videos" or "recordings" for a folder with such files, by its first subfolder with any; else None."""
    for _, folders, names in os.walk(path, followlinks=True):
        folders.sort()
        for kind, endings in (("videos", VIDEO_ENDINGS), ("recordings", SOUND_ENDINGS)):
            if any(name.lower().endswith(endings) for name in names):
                return kind
    return None


def _where(path: str) -> str:
    """Return the folder in which a relative path was looked up, for error messages."""
    if path.startswith("~"):
        return " ('~' is not expanded: give the full path)"
    return "" if os.path.isabs(path) else f" in {os.getcwd()}"


def _instead(path: str) -> str:
    """Return a suggestion for images without class folders, or for files of other kinds."""
    if count_images(path):
        return (
            f" For images without class folders, give a list with a line `path label` for each image: "
            f"ps.open('train.txt', root={path!r}, size=...)"
        )
    return " For files of other kinds give a list of them: ps.open('train.txt', root=..., load=ps.LoadBytes())"


def _check_splits(path: str, classes: list[str]) -> None:
    """Raise ConfigError if the folders are splits that contain the class folders."""
    if not {name.lower() for name in classes} <= _SPLITS:
        return
    if any(entry.is_dir() for name in classes for entry in os.scandir(os.path.join(path, name))):
        raise ConfigError(
            f"{path}: its subfolders {', '.join(classes)} are splits, which contain the class folders: open one split, "
            f"such as {os.path.join(path, classes[0])!r}"
        )
