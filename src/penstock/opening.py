"""`penstock.open`: one door to whatever holds samples.

penstock.open("train.txt", root="/data")          RankDataset      text, CSV, JSONL, Parquet, Arrow
penstock.open("train-{000..099}.tar")             ShardDataset     tar shards; compressed ones: StreamShards
penstock.open("data/imagenet-mds")                MDSDataset       a folder with index.json
penstock.open("data/imagenet")                    RankDataset      a folder with one folder of images a class
penstock.open("data/shards")                      ShardDataset     a folder of tar files; compressed: StreamShards
penstock.open("data/squad", split="train")        TableDataset     a folder of `datasets`, of Arrow or Parquet files
penstock.open("train-*.parquet")                  TableDataset     the same, if there are no columns path and label
penstock.open("features-*.npy")                   ArrayDataset     rows of memory-mapped NumPy files
penstock.open("data/arrays")                      RankDataset      a folder of NumPy files, one a sample
penstock.open("tokens-*.bin", dtype="uint16", sequence_length=2048)             TokenDataset; .npy too

Files of any other kind: a manifest that names them, and ``load=penstock.LoadBytes()``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError
from penstock.manifest.formats import EXTENSIONS, format_of
from penstock.shards.urls import expand, local_path
from penstock.storage.urls import shown
from penstock.tables.files import is_table_folder

if TYPE_CHECKING:
    from torch.utils.data import Dataset

__all__ = ["folder_manifest", "kind_of", "open", "shards_in"]

_TAR = (".tar",)
_COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
_ARRAYS = (".npy",)
_TEXT = (".txt", ".list", ".lst", ".text")
_PATH = (str, os.PathLike)
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "split": ((str,), "the name of a split, such as 'train'"),
    "root": (_PATH, "a folder or an address, as str or Path"),
    "cache_dir": (_PATH, "a folder, as str or Path"),
    "format": ((str,), "the name of a format, such as 'csv', or 'auto'"),
    "label": ((str,), "a type such as 'int' or 'float', or None"),
    "comment": ((str,), "the characters that begin a comment, such as '#'"),
    "shuffle": ((str,), "the name of an order: 'global', 'block' or 'none'"),
    "remainder": ((str,), "'pad', 'drop' or 'uneven'"),
    **dict.fromkeys(("seed", "rank", "world_size", "mini_epochs", "group"), ((Integral,), "an integer")),
    **dict.fromkeys(("block_size", "window", "buffer_bytes", "sequence_length", "stride"), ((Integral,), "an integer")),
    "cache_bytes": ((Integral,), "a number of bytes"),
    "columns": ((list, tuple, Mapping), "a list of names, or a mapping of them"),
    "labels": ((*_PATH, list, tuple), "files, as str, Path or a list of these"),
}
"""Options that any data set may have, and what they take; None is always its default."""

_MANIFEST = ("columns", "label", "format", "header", "blank", "comment", "cache_dir", "progress", "root")


def open(source: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], **options: Any) -> Dataset[Any]:
    """The data set for a source, by its name and by what is there.

    Args:
        source: see above; shards and manifests may be several (a list, braces, patterns, ``::``).
        options: of that data set; of a manifest also those of `Manifest.open`.

    Raises:
        ConfigError: nothing that is known. The message says what was looked for.
        PenstockError: what the data set raises.
    """
    kind, names = _look_at(expand(source, options.get("storage")), options)
    return _OPENERS[kind](names, options)


def kind_of(source: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], **options: Any) -> str:
    """Return what `open` takes a source for, in words: "manifests", "shards", "tables", "a folder of images" ...

    Raises:
        ConfigError: nothing that is known.
    """
    return _look_at(expand(source, options.get("storage")), options)[0]


def folder_manifest(path: str) -> dict[str, Any] | None:
    """Return the arguments of `Manifest.open` for a folder of images by class, or of ``.npy`` files; else None."""
    from penstock.datasets.arrays import list_arrays
    from penstock.shards.pack import list_images
    from penstock.storage import cache_root

    root, lists = os.path.abspath(path), cache_root() / "folders"
    listed = list_images(path, lists)
    if listed is not None:
        return {"source": listed, "root": root}
    arrays = list_arrays(path, lists)
    return None if arrays is None else {"source": arrays, "root": root, "label": None}


def shards_in(path: str, endings: tuple[str, ...] = _TAR) -> list[str]:
    """Return the shards in a folder, sorted, without hidden files: these are half-written, or another system's."""
    entries = (entry for entry in os.scandir(path) if not entry.name.startswith("."))
    return sorted(entry.path for entry in entries if entry.name.endswith(endings) and entry.is_file())


def _look_at(names: list[str], options: dict[str, Any]) -> tuple[str, list[str]]:
    """Return the kind of a source, and its names; those of a folder of shards are the shards in it."""
    _check_options(options)
    if len(names) == 1 and (path := local_path(names[0])) is not None and os.path.isdir(path):
        return _folder(path, options)
    kinds = {"tokens" if "sequence_length" in options else _kind(name) for name in names}
    if kinds == {"manifests"} and _holds_samples(names[0], options):
        kinds = {"tables"}
    if len(kinds) > 1:
        raise ConfigError(f"{_said(names)}: {' and '.join(sorted(kinds))} together; open them one by one")
    return kinds.pop(), names


def _check_options(options: dict[str, Any]) -> None:
    """Refuse values of another type before anybody stumbles over them."""
    for name, (kinds, what) in _TYPES.items():
        value = options.get(name)
        if value is not None and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
            raise ConfigError(f"{name}= takes {what}, got {value!r}")


def _kind(name: str) -> str:
    lower = name.lower().partition("?")[0]
    if lower.endswith(_TAR):
        return "shards"
    if lower.endswith(_COMPRESSED):
        return "compressed shards"
    if lower.endswith(_ARRAYS):
        return "arrays"
    if lower.endswith((*_TEXT, *EXTENSIONS)):
        return "manifests"
    path = local_path(name)
    if path is None and "." not in lower.rpartition("/")[2]:
        return "MDS folders"
    if path is not None and not os.path.exists(path):
        raise ConfigError(f"{shown(name)}: there is no such file or folder")
    raise ConfigError(
        f"{shown(name)}: neither a manifest ({', '.join([*_TEXT, *EXTENSIONS])}), a tar shard (.tar, .tar.gz, .tgz, "
        "...), NumPy files (.npy), an MDS folder (index.json in it), nor a folder with one folder of images for each "
        "class; for a manifest with another name use Manifest.open(..., format='text'), for files of tokens say "
        "dtype= and sequence_length="
    )


def _holds_samples(name: str, options: dict[str, Any]) -> bool:
    """Whether a file of columns holds the samples themselves: it does not name files and their labels, and nothing was
    said of how to read it as a manifest."""
    given = options.keys() & (set(_MANIFEST) - {"columns"})
    if format_of(name.partition("?")[0]) not in ("parquet", "arrow") or given:
        return False
    wanted = options.get("columns")
    if wanted is not None:
        return not isinstance(wanted, Mapping) and "path" not in {str(column).partition(":")[0] for column in wanted}
    from penstock.tables.table import read_schema

    return not {"path", "label"} <= set(read_schema(name, options.get("storage")).names)


def _folder(path: str, options: dict[str, Any]) -> tuple[str, list[str]]:
    split = options.get("split")
    if os.path.exists(os.path.join(path, split or "", "index.json")):
        return "MDS folders", [path]
    for endings, kind in ((_TAR, "shards"), (_COMPRESSED, "compressed shards")):
        if shards := shards_in(path, endings):
            return kind, shards
    if is_table_folder(path):
        return "tables", [path]
    listed = folder_manifest(path)
    if listed is None:
        raise ConfigError(
            f"{path}: a folder, but with neither index.json (MDS), *.tar, *.arrow, *.parquet, *.npy, nor images in one "
            "folder for each class"
        )
    return ("a folder of images" if "label" not in listed else "a folder of arrays"), [path]


def _listed(names: list[str], options: dict[str, Any]) -> Dataset[Any]:
    from penstock.datasets import LoadArray, RankDataset
    from penstock.manifest import Manifest

    listed = folder_manifest(names[0])
    assert listed is not None
    load = {"load": LoadArray()} if "label" in listed else {}
    return RankDataset(Manifest.open(**listed), **{**load, **options})


def _manifests(names: list[str], options: dict[str, Any]) -> Dataset[Any]:
    from penstock.datasets import RankDataset
    from penstock.manifest import Manifest

    how = {name: options.pop(name) for name in (*_MANIFEST, "storage") if name in options}
    return RankDataset(Manifest.open(names[0] if len(names) == 1 else names, **how), **options)


def _tables(names: list[str], options: dict[str, Any]) -> Dataset[Any]:
    from penstock.tables import TableDataset

    files = _as_they_are(names)
    return TableDataset(files[0] if len(files) == 1 else files, **options)


def _shards(names: list[str], options: dict[str, Any]) -> Dataset[Any]:
    from penstock.shards import ShardDataset

    return ShardDataset(_as_they_are(names), **options)


def _streams(names: list[str], options: dict[str, Any]) -> Dataset[Any]:
    from penstock.shards import StreamShards

    return StreamShards(_as_they_are(names), **options)


def _mds(names: list[str], options: dict[str, Any]) -> Dataset[Any]:
    from penstock.shards.mds import MDSDataset

    if len(names) > 1:
        raise ConfigError(f"{_said(names)}: several MDS folders; open them one by one, and put them into a Mixture")
    return MDSDataset(names[0], **options)


def _arrays(names: list[str], options: dict[str, Any]) -> Dataset[Any]:
    from penstock.datasets import ArrayDataset

    return ArrayDataset(_as_they_are(names), **options)


def _tokens(names: list[str], options: dict[str, Any]) -> Dataset[Any]:
    from penstock.datasets import TokenDataset

    return TokenDataset(_as_they_are(names), **options)


def _as_they_are(names: list[str]) -> list[str | Path]:
    """Names that are not expanded a second time."""
    return [name if local_path(name) is None else Path(local_path(name) or "") for name in names]


def _said(names: list[str]) -> str:
    return ", ".join(map(shown, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


_OPENERS = {
    "MDS folders": _mds,
    "a folder of arrays": _listed,
    "a folder of images": _listed,
    "arrays": _arrays,
    "compressed shards": _streams,
    "manifests": _manifests,
    "shards": _shards,
    "tables": _tables,
    "tokens": _tokens,
}
