"""Find and open the files of a table: patterns, folders of Arrow and Parquet files, folders of `huggingface/datasets`.

data/squad/dataset_dict.json          the splits, each a folder as below
data/squad/train/state.json           the files, in order: data-00000-of-00002.arrow, ...
squad-train-00000-of-00003.arrow      a file of the cache of `datasets`, or of a snapshot of a hub, with the split
data/train-00000-of-00003-af12.parquet  in its name
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError, DataFileError, DataFileIOError, StorageNotFoundError
from penstock.storage import File, Storage, is_remote
from penstock.storage.files import DATA
from penstock.storage.mapped import MappedFile, MappedFiles, inspect_file
from penstock.storage.names import Urls, expand_versions, without_query
from penstock.storage.remote import RemoteSource
from penstock.storage.stream import in_threads
from penstock.storage.transfer import Stat
from penstock.storage.urls import is_inside, scheme, shown

__all__ = [
    "DESCRIPTIONS",
    "ENDINGS_IN_FOLDERS",
    "JSON_ENDINGS",
    "Found",
    "FoundFiles",
    "are_json",
    "delimiter_of",
    "is_stored_parquet",
    "open_parts",
    "table_files",
]

Found = tuple[str, Stat | None]
"""A file of a table, and its version if known."""


class FoundFiles(list[Found]):
    """The files of a table, in order, as the source of a table: their names are not expanded again."""


_ENDINGS = (".arrow", ".parquet", ".pq", ".feather", ".ipc")
JSON_ENDINGS = tuple(name + packed for name in (".jsonl", ".ndjson", ".json") for packed in ("", ".zst", ".gz"))
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_IN_FOLDERS = tuple(name for name in JSON_ENDINGS if name != ".json")  # in folders, .json files are descriptions
_COPIES = 4  # files copied at a time
ENDINGS_IN_FOLDERS = (*_ENDINGS, *(name for name in JSON_ENDINGS if name.endswith((".zst", ".gz"))))
"""What tells that a folder holds tables. Plain JSON lines may be lists of the images in it."""

_DICT, _STATE = "dataset_dict.json", "state.json"
DESCRIPTIONS = {_DICT, _STATE}
"""The files by which `datasets` describes a folder that it wrote."""
_NUMBERED = re.compile(r"(?:^|[-/])([A-Za-z0-9_.]+)-\d+-of-\d+(?:-[0-9a-f]+)?\.[a-z.]+$")
_WORDS = re.compile(r"[^A-Za-z0-9]+")
_SPLITS = {
    name: split
    for split, names in {
        "train": ("train", "training"),
        "validation": ("validation", "valid", "val", "dev"),
        "test": ("test", "testing", "eval", "evaluation"),
    }.items()
    for name in names
}
# Hidden files, and caches of `map` of datasets.
_NOT_DATA = re.compile(r"(?:^|/)(?:[._]|cache-[0-9a-f]{16}[^/]*\.arrow$)")


def table_files(source: Urls | FoundFiles, split: str | None = None, storage: Storage | None = None) -> FoundFiles:
    """Return the files of a table, in order, each with its version if a store listed it.

    Args:
        source: a folder, files, patterns, braces, ``::``, or a list of files; or the result of this function.
        split: the split, for a folder that holds several.
        storage: access options.

    Raises:
        ConfigError: no split given but there are several, an unknown split, or a split for single files.
        DataFileIOError: a folder that cannot be read, or holds no table files.
        DataFileError: a folder of `datasets` with a damaged description, or with an index of row order.
        ShardIOError, StorageNotFoundError: nothing matches a pattern.
    """
    if isinstance(source, FoundFiles):
        return source
    if split is not None and not isinstance(split, str):
        raise ConfigError(f"split= takes the name of a split, such as 'train', got {split!r}")
    storage = storage or Storage()
    found = expand_versions(source, storage)
    name, version = found[0]
    is_folder = not _ends(name) and version is None if is_remote(name) else os.path.isdir(name)
    if len(found) > 1 or not is_folder:
        if split is not None:
            raise ConfigError(f"split={split!r} chooses files of a folder; these are files: name those of the split")
        return FoundFiles((storage.pinned(name), stat) for name, stat in found)
    folder = storage.pinned(name.rstrip("/")) if is_remote(name) else name
    described = _read(_inside(folder, _DICT), storage)
    if described is not None:
        name = _chosen(folder, list(map(str, _entries(described, "splits", _inside(folder, _DICT)))), split)
        folder, split = _named(folder, name, _DICT), None
    state = _read(_inside(folder, _STATE), storage)
    if state is not None:
        return _of_state(folder, state, split)
    if described is not None:
        raise DataFileError(f"{shown(folder)} is named in {_DICT}, and has no {_STATE}: it is not complete")
    return _listed(folder, split, storage)


def open_parts(found: Sequence[Found], storage: Storage | None, *, as_they_are: Callable[[str], bool]) -> MappedFiles:
    """Open the files of a table, given with their versions if known: local ones are mapped. Raises as `inspect_file`.

    ``as_they_are`` returns whether a remote file is opened in place. Later reads then use a copy in the cache, or range
    requests if the cache has no room: the requested columns of a row group, or the rows of JSON lines. Parquet on a hub
    is not copied, so a dataset may exceed the disk. All other files are copied now.
    """
    ranged = [number for number, (name, _) in enumerate(found) if as_they_are(name)]
    opened = in_threads(lambda number: RemoteSource(found[number][0], storage, found[number][1]), ranged)
    sources = dict(zip(ranged, opened, strict=True))
    on_hub = {number for number in ranged if scheme(sources[number].url) == "hf"}
    in_place = {number for number in on_hub if is_stored_parquet(sources[number].url)}
    rest = [name for number, (name, _) in enumerate(found) if number not in sources]
    others = iter(in_threads(lambda name: inspect_file(name, "uint8", storage), rest, count=_COPIES))
    files = [MappedFile.of(sources[number]) if number in sources else next(others) for number in range(len(found))]
    delimiters = {number: sign for number, (name, _) in enumerate(found) if (sign := delimiter_of(name)) is not None}
    conversions = {number: partial(_converted, sign) for number, sign in delimiters.items()}
    return MappedFiles(files, sources, in_place, conversions)


def _converted(delimiter: str, file: File) -> File:
    from penstock.tables.csv import converted_table

    return converted_table(file, delimiter)


def is_stored_parquet(name: str) -> bool:
    """Return whether a name is the URL of a Parquet file in a store."""
    return is_remote(name) and name.partition("?")[0].lower().endswith((".parquet", ".pq"))


def delimiter_of(name: str) -> str | None:
    """Return the delimiter of a CSV or TSV file, by its name; None for other files."""
    return _DELIMITERS.get(os.path.splitext(without_query(name))[1].lower())


def are_json(names: list[str]) -> bool:
    """Return whether files are JSON lines, by their names.

    Raises:
        ConfigError: only some of them are.
    """
    kinds = {_ends(name, JSON_ENDINGS) for name in names}
    if len(kinds) > 1:
        json_lines = next(name for name in names if _ends(name, JSON_ENDINGS))
        other = next(name for name in names if not _ends(name, JSON_ENDINGS))
        raise ConfigError(
            f"{shown(json_lines)} is JSON lines and {shown(other)} is not: open them one by one, and put them into a "
            "Mixture"
        )
    return kinds == {True}


def _inside(folder: str, name: str) -> str:
    return f"{folder}/{name}" if is_remote(folder) else os.path.join(folder, name)


def _named(folder: str, name: str, where: str) -> str:
    """Return the path of a file that a description in the folder, ``where``, names."""
    if not is_inside(name):
        raise DataFileError(f"{shown(_inside(folder, where))} names {name!r}, which is not within its folder")
    return _inside(folder, name)


def _read(path: str, storage: Storage) -> Any:
    """Return the content of a JSON file; None if it does not exist."""
    try:
        data = storage.read(path) if is_remote(path) else Path(path).read_bytes()
    except (StorageNotFoundError, FileNotFoundError):
        return None
    except OSError as error:
        raise DATA.error(path, error) from error
    try:
        return json.loads(data)
    except ValueError as error:
        raise DataFileError(f"{shown(path)} is not JSON, or is truncated: {error}") from None


def _parts(url: str) -> list[str]:
    return url.partition("://")[2].strip("/").split("/")


def _ends(url: str, endings: tuple[str, ...] = (*_ENDINGS, *JSON_ENDINGS, *_DELIMITERS)) -> bool:
    return without_query(url).lower().endswith(endings)


def _entries(described: Any, key: str, path: str) -> list[Any]:
    found = described.get(key) if isinstance(described, dict) else None
    if not isinstance(found, list) or not found:
        raise DataFileError(f"{shown(path)} names no {key}")
    return found


def _chosen(path: str, splits: list[str], split: str | None) -> str:
    """Return the requested split, or the only one."""
    if split in splits:
        return str(split)
    alike = [name for name in splits if split is not None and _SPLITS.get(name, name) == _SPLITS.get(split, split)]
    if len(alike) == 1:
        return alike[0]
    if split is None and len(splits) == 1:
        return splits[0]
    said = f"there is no split {split!r}" if split is not None else "name one with split="
    raise ConfigError(f"{shown(path)} holds the splits {', '.join(splits)}: {said}")


def _of_state(folder: str, state: Any, split: str | None) -> FoundFiles:
    path = _inside(folder, _STATE)
    files = _entries(state, "_data_files", path)
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise DataFileError(
            f"{shown(folder)} keeps an order of its rows beside them (indices.arrow), as old versions of datasets did: "
            "load it there and save it again, with flatten_indices()"
        )
    if split is not None and state.get("_split") != split:
        raise ConfigError(f"{shown(folder)} is the split {state.get('_split')!r} alone, not {split!r}")
    try:
        return FoundFiles((_named(folder, str(file["filename"]), _STATE), None) for file in files)
    except (TypeError, KeyError):
        raise DataFileError(f"{shown(path)}: '_data_files' names no files: {files!r}"[:300]) from None


def _listed(folder: str, split: str | None, storage: Storage) -> FoundFiles:
    """Return the table files in and below a folder, in the order of their names; JSON lines if there are no others."""
    listed: list[tuple[str, Found]]
    if is_remote(folder):
        depth = len(_parts(folder))  # a store may spell the folder differently, such as with its version
        objects = storage.list_objects(f"{folder}/**")
        listed = [("/".join(_parts(name)[depth:]), (name, stat)) for name, stat in objects]
    else:
        paths = (os.path.join(where, name) for where, _, inside in os.walk(folder) for name in inside)
        listed = [(os.path.relpath(path, folder).replace(os.sep, "/"), (path, None)) for path in paths]
    for endings in (_ENDINGS, _IN_FOLDERS):
        found = {name: file for name, file in listed if name.endswith(endings) and not _NOT_DATA.search(name)}
        if found:
            break
    else:
        raise DataFileIOError(
            f"{shown(folder)}: a folder without {_STATE}, {_DICT} or files of tables "
            f"({', '.join([*_ENDINGS, *_IN_FOLDERS])})"
        )
    splits = {name: _split_of(name) for name in sorted(found)}
    present = sorted(set(splits.values()))
    if split is not None or len(present) > 1:
        present = [_chosen(folder, [name for name in present if name], split)]
    return FoundFiles(found[name] for name, its in splits.items() if its == present[0])


def _split_of(name: str) -> str:
    """Return the split of a file by its name; "" if the name has none."""
    numbered = _NUMBERED.search(name)
    words = [word.lower() for word in _WORDS.split(name)]
    if numbered is not None and (numbered[1].lower() in _SPLITS or not any(word in _SPLITS for word in words)):
        return numbered[1]
    return next((word for word in words if word in _SPLITS), "")
