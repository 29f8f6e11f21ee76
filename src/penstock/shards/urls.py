"""Which shards are meant: brace notation, lists, patterns, and several of those with ``::``.

>>> expand("train-{000..002}.tar")
['train-000.tar', 'train-001.tar', 'train-002.tar']
>>> expand("a.tar::s3://bucket/{b,c}.tar")
['a.tar', 's3://bucket/b.tar', 's3://bucket/c.tar']

Patterns (``*``, ``?``, ``[..]``) are looked up and sorted, in the local file system and in stores that list what they
hold. Nothing else is looked at: that a shard exists shows when it is opened.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import Any

from penstock.errors import ConfigError, ShardIOError
from penstock.storage import Storage, is_remote, list_objects
from penstock.storage.backend import Stat

__all__ = ["Urls", "braces", "expand", "expand_versions", "is_local", "local_path"]

Urls = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]

_RANGE = re.compile(r"^(-?\d+|[A-Za-z])\.\.(-?\d+|[A-Za-z])(?:\.\.(-?\d+))?$")
_SCHEME = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]+:")
_LARGEST = 10_000_000


def expand(urls: Urls, storage: Storage | None = None) -> list[str]:
    """The shards that a specification names, in order.

    Args:
        urls: a string, a path, or a collection of both. Strings are cut at ``::`` and expanded; a path is taken as it
            is.
        storage: how a store is reached, for patterns.

    Raises:
        ConfigError: nothing is named, something else than a name, or braces that are not balanced.
        ShardIOError: no file matches a pattern.
        StorageError: a store says no; StorageNotFoundError: no object matches a pattern.
    """
    return [url for url, _ in expand_versions(urls, storage)]


def expand_versions(urls: Urls, storage: Storage | None = None) -> list[tuple[str, Stat | None]]:
    """The same, each with its version where a store has told it by listing. Raises as `expand` does."""
    if isinstance(urls, os.PathLike):
        return [(os.fspath(urls), None)]
    if isinstance(urls, str):
        return [found for part in urls.split("::") for text in braces(part) for found in _matches(text, storage)]
    given: Any = urls
    if isinstance(given, bytes) or not isinstance(given, Iterable):
        raise ConfigError(f"a source is a path or an address, as str or Path, or a list of these; got {urls!r}")
    result = [found for part in urls for found in expand_versions(part, storage)]
    if not result:
        raise ConfigError("no source is named: the list is empty. Give a path, an address, or several of them")
    return result


def is_local(url: str) -> bool:
    """Whether a shard is a local file: a path, or ``file:`` and a path."""
    return url.startswith("file:") or not _SCHEME.match(url)


def local_path(url: str) -> str | None:
    """The path of a local shard, None for others."""
    if url.startswith("file:"):
        path = url[5:]
        return "/" + path[2:].partition("/")[2] if path.startswith("//") else path
    return url if is_local(url) else None


def _matches(text: str, storage: Storage | None) -> Sequence[tuple[str, Stat | None]]:
    if not text:
        raise ConfigError(
            "no source is named: an empty name. Give a path or an address (between two '::', or at an end of the "
            "names, there is none)"
        )
    if is_remote(text) and not text.startswith(("http:", "https:")) and any(sign in text for sign in "*["):
        # Web servers do not list, and what a question mark begins is a query.
        return list_objects(text, storage=storage)
    if not is_local(text) or not glob.has_magic(text) or os.path.exists(text):
        return [(text, None)]
    found = sorted(glob.glob(text, recursive=True))
    if not found:
        raise ShardIOError(f"no file matches {text}")
    return [(path, None) for path in found]


def braces(text: str) -> list[str]:
    """A text with its braces expanded, as a shell does: ``{a,b}``, ``{000..010}`` (zeros are kept), ``{a..e}``,
    ``{0..8..2}``, also within each other. Braces around neither, as in ``{x}``, stay; so do those after a backslash.

    Raises:
        ConfigError: a brace without its partner, or more than ten million results.
    """
    if "{" not in text and "}" not in text:
        return [text]
    parts = list(_parts(text))
    count = 1
    for part in parts:
        count *= len(part)
    if count > _LARGEST:
        raise ConfigError(f"{text!r} stands for {count:,} shards")
    return ["".join(pieces) for pieces in product(*parts)]


def _parts(text: str) -> Iterator[list[str]]:
    """What a text is made of: the alternatives of each part, one for plain text."""
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
        raise ConfigError(f"{{{first}..{last}}} stands for more than {_LARGEST:,} shards")
    numbers = range(low, high + (1 if stride > 0 else -1), stride)
    return [chr(n) for n in numbers] if letters[0] else [f"{n:0{width}d}" for n in numbers]


def _unescaped(text: str) -> str:
    return re.sub(r"\\([{},\\])", r"\1", text) if "\\" in text else text
