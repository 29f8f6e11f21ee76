"""Expand shard specifications: brace notation, lists, patterns, and several of these joined by ``::``.

>>> expand("train-{000..002}.tar")
['train-000.tar', 'train-001.tar', 'train-002.tar']
>>> expand("a.tar::s3://bucket/{b,c}.tar")
['a.tar', 's3://bucket/b.tar', 's3://bucket/c.tar']

Patterns (``*``, ``?``, ``[..]``) are looked up and sorted, in the local file system and in stores that can be listed.
Nothing else is checked: a missing shard raises when it is opened.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Any

from penstock.errors import ConfigError, ShardIOError, StorageError, StorageUnavailableError
from penstock.storage import RemoteSource, Storage, is_remote, list_objects
from penstock.storage.backend import Stat
from penstock.storage.parallel_requests import LOOKS, in_threads
from penstock.storage.urls import WEB, scheme

__all__ = ["Urls", "braces", "expand", "expand_versions", "is_local", "local_path", "with_versions"]

Urls = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]

_RANGE = re.compile(r"^(-?\d+|[A-Za-z])\.\.(-?\d+|[A-Za-z])(?:\.\.(-?\d+))?$")
_SCHEME = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]+:")
_LARGEST = 10_000_000


def expand(urls: Urls, storage: Storage | None = None) -> list[str]:
    """Return the shards of a specification, in order.

    Args:
        urls: a string, a path, or a collection of both. Strings are split at ``::`` and expanded; paths are not.
        storage: access options, for patterns.

    Raises:
        ConfigError: no name, an object that is not a name, or unbalanced braces.
        ShardIOError: no file matches a pattern.
        StorageError: a store fails; StorageNotFoundError: no object matches a pattern.
    """
    return [url for url, _ in expand_versions(urls, storage)]


def expand_versions(urls: Urls, storage: Storage | None = None) -> list[tuple[str, Stat | None]]:
    """Return the same shards, each with its version if a store listed it. Raises as `expand` does."""
    if isinstance(urls, os.PathLike):
        return [(os.fspath(urls), None)]
    if isinstance(urls, str):
        return [found for part in urls.split("::") for text in braces(part) for found in _matches(text, storage)]
    given: Any = urls
    if isinstance(given, bytes) or not isinstance(given, Iterable):
        raise ConfigError(f"a source must be a path or URL, as str or Path, or a list of these; got {urls!r}")
    result = [found for part in urls for found in expand_versions(part, storage)]
    if not result:
        raise ConfigError("no source given: the list is empty. Pass a path, a URL, or several of them")
    return result


def with_versions(
    found: Sequence[tuple[str, Stat | None]], storage: Storage | None = None
) -> list[tuple[str, Stat | None]]:
    """Return objects of a store with the versions that they have now, so that later reads notice another one.

    Up to 48 objects are looked up by themselves, all at once. For more, their folders are listed, which takes one
    request for 1,000 objects. The version stays unknown for more objects of a web server, which cannot list them, or of
    a store that refuses to, and for objects that do not exist: the first read determines it.

    Raises:
        StorageUnavailableError: the store does not answer.
    """
    unknown = [url for url, stat in found if stat is None]
    known: dict[str, Stat | None] = {}
    if len(unknown) <= LOOKS:
        known = dict(zip(unknown, in_threads(lambda url: _version(url, storage), unknown), strict=True))
    else:
        folders = {url.rpartition("/")[0] for url in unknown if scheme(url) not in (*WEB, "ais")}
        for listed in in_threads(lambda folder: _versions(folder, storage), sorted(folders)):
            known |= listed
    return [(url, known.get(url) if stat is None else stat) for url, stat in found]


def _version(url: str, storage: Storage | None) -> Stat | None:
    try:
        return RemoteSource(url, storage).stat
    except StorageUnavailableError:
        raise
    except StorageError:  # raised again when the object is read
        return None


def _versions(folder: str, storage: Storage | None) -> dict[str, Stat]:
    try:
        return dict(list_objects(f"{folder}/*", storage=storage))
    except StorageUnavailableError:
        raise
    except StorageError:  # no permission to list, or no such folder
        return {}


def is_local(url: str) -> bool:
    """Return whether a shard is a local file: a path, or ``file:`` and a path."""
    return url.startswith("file:") or not _SCHEME.match(url)


def local_path(url: str) -> str | None:
    """Return the path of a local shard, None for others."""
    if url.startswith("file:"):
        path = url[5:]
        return "/" + path[2:].partition("/")[2] if path.startswith("//") else path
    return url if is_local(url) else None


def _matches(text: str, storage: Storage | None) -> Sequence[tuple[str, Stat | None]]:
    if not text:
        raise ConfigError(
            "no source given: a name is empty. Pass a path or a URL (check for '::' without a name on one side)"
        )
    if is_remote(text) and not text.startswith(("http:", "https:")) and any(sign in text for sign in "*["):
        # Web servers cannot be listed, and a question mark begins a query.
        return list_objects(text, storage=storage)
    if not is_local(text) or not glob.has_magic(text) or os.path.exists(text):
        return [(text, None)]
    found = sorted(glob.glob(text, recursive=True))
    if not found:
        raise ShardIOError(f"no file matches {text}")
    return [(path, None) for path in found]


def braces(text: str) -> list[str]:
    """Return a text with its braces expanded, as in a shell.

    Supports ``{a,b}``, ``{000..010}`` (with leading zeros), ``{a..e}`` and ``{0..8..2}``, also nested. Other braces, as
    in ``{x}``, are left unchanged, and so are braces after a backslash.

    Raises:
        ConfigError: unbalanced braces, or more than ten million results.
    """
    if "{" not in text and "}" not in text:
        return [text]
    parts = list(_parts(text))
    count = 1
    for part in parts:
        count *= len(part)
    if count > _LARGEST:
        raise ConfigError(f"{text!r} expands to {count:,} shards, more than the limit of {_LARGEST:,}")
    return ["".join(pieces) for pieces in product(*parts)]


def _parts(text: str) -> Iterator[list[str]]:
    """Yield the alternatives of each part of a text; plain text has one."""
    position = plain = 0
    while position < len(text):
        letter = text[position]
        if letter == "\\":
            position += 2
        elif letter == "$" and text.startswith("{", position + 1):
            end = text.find("}", position)
            if end < 0:
                raise ConfigError(f"unbalanced braces in {text!r}")
            position = end + 1
        elif letter == "{":
            end = _partner(text, position)
            yield [_unescaped(text[plain:position])]
            yield _alternatives(text[position + 1 : end])
            position = plain = end + 1
        elif letter == "}":
            raise ConfigError(f"unbalanced braces in {text!r}")
        else:
            position += 1
    yield [_unescaped(text[plain:])]


def _partner(text: str, opening: int) -> int:
    depth, position = 0, opening
    while position < len(text):
        letter = text[position]
        depth += (letter == "{") - (letter == "}")
        if not depth:
            return position
        position += 2 if letter == "\\" else 1
    raise ConfigError(f"unbalanced braces in {text!r}")


def _alternatives(inside: str) -> list[str]:
    found = _RANGE.match(inside)
    if found:
        expanded = _range(*found.groups())
        if expanded is not None:
            return expanded
    pieces = _at_commas(inside)
    if len(pieces) == 1:
        return ["{" + piece + "}" for piece in braces(inside)]
    return [result for piece in pieces for result in braces(piece)]


def _at_commas(inside: str) -> list[str]:
    pieces, depth, begin, position = [], 0, 0, 0
    while position < len(inside):
        letter = inside[position]
        depth += (letter == "{") - (letter == "}")
        if letter == "," and not depth:
            pieces.append(inside[begin:position])
            begin = position + 1
        position += 2 if letter == "\\" else 1
    return [*pieces, inside[begin:]]


def _range(first: str, last: str, step: str | None) -> list[str] | None:
    letters = first.isalpha(), last.isalpha()
    if letters[0] != letters[1]:
        return None
    width = 0
    if letters[0]:
        low, high = ord(first), ord(last)
    else:
        low, high = int(first), int(last)
        if any(len(text.lstrip("-")) > 1 and text.lstrip("-")[0] == "0" for text in (first, last)):
            width = max(len(first), len(last))
    stride = abs(int(step)) if step else 1
    stride = (stride or 1) * (1 if high >= low else -1)
    if abs(high - low) > _LARGEST * abs(stride):
        raise ConfigError(f"{{{first}..{last}}} expands to more than {_LARGEST:,} shards")
    numbers = range(low, high + (1 if stride > 0 else -1), stride)
    return [chr(n) for n in numbers] if letters[0] else [f"{n:0{width}d}" for n in numbers]


def _unescaped(text: str) -> str:
    return re.sub(r"\\([{},\\])", r"\1", text) if "\\" in text else text
