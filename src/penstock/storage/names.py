"""Expand the names of sources: braces, patterns, lists, ``file://`` addresses, and several names joined by ``::``.

>>> expand("train-{000..002}.tar")
['train-000.tar', 'train-001.tar', 'train-002.tar']
>>> expand("a.tar::s3://bucket/{b,c}.tar")
['a.tar', 's3://bucket/b.tar', 's3://bucket/c.tar']
>>> expand("file:///data/my%20list.txt")
['/data/my list.txt']

All formats read names by this module alone. Patterns (``*``, ``?``, ``[..]``) are looked up and sorted, in the local
file system and in stores that can be listed; they leave out the indexes that Penstock writes beside sources. A local
file that exists under a name is that file, whatever signs the name has. Nothing else is checked: a missing file raises
when it is opened.
"""

from __future__ import annotations

import glob
import math
import os
import re
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError, PenstockError, ShardIOError, StorageError, StorageUnavailableError
from penstock.storage.urls import WEB, Name, is_remote, not_a_name, path_of, scheme, text_of

if TYPE_CHECKING:
    from penstock.storage.remote import Storage
    from penstock.storage.transfer import Stat

__all__ = ["Urls", "braces", "expand", "expand_versions", "with_versions", "without_query"]

Urls = Name | Iterable[Name]

_LARGEST = 1_000_000
_RANGE = re.compile(r"\{(-?\d+)\.\.(-?\d+)(?:\.\.-?(\d+))?\}")
_LIST = re.compile(r"\{([^{}]*,[^{}]*)\}")
_NESTED = re.compile(r"\{[^{}]*\{|\\")
_SIGNS = re.compile(r"[*?\[{}]|::")
_INDEXES = (".pstk", ".pidx", ".entries", ".sizes.arrow")  # files that Penstock writes beside sources


def expand(names: Urls, storage: Storage | None = None, *, error: type[PenstockError] = ShardIOError) -> list[str]:
    """Return the paths and URLs that a source names, in order.

    Args:
        names: a string, a path, or a collection of both. Strings are split at ``::``, and their braces and patterns are
            expanded; of a path, only patterns are. A command (``pipe:``) in a list is not expanded.
        storage: access options, for patterns.
        error: the type of the error if no file matches a pattern.

    Raises:
        ConfigError: no name, an object that is not a name, unbalanced braces, or more than a million results of them.
        ShardIOError: no file matches a pattern.
        StorageError: a store fails; StorageNotFoundError: no object matches a pattern.
    """
    return [name for name, _ in expand_versions(names, storage, error=error)]


def expand_versions(
    names: Urls, storage: Storage | None = None, *, error: type[PenstockError] = ShardIOError
) -> list[tuple[str, Stat | None]]:
    """Return the same names, each with its version if a store listed it. Raises as `expand` does."""
    if isinstance(names, str):
        parts = [names] if _exists(names) else [text for part in names.split("::") for text in braces(part)]
        return [found for part in parts for found in _matches(part, storage, error)]
    if isinstance(names, os.PathLike):
        return _matches(text_of(names), storage, error)
    given: Any = names
    if isinstance(given, bytes) or not isinstance(given, Iterable):
        raise not_a_name(names)
    result: list[tuple[str, Stat | None]] = []
    for part in names:
        is_command = isinstance(part, str) and part.startswith("pipe:")
        result += [(str(part), None)] if is_command else expand_versions(part, storage, error=error)
    if not result:
        raise ConfigError("no source given: the list is empty. Pass a path, a URL, or several of them")
    return result


def _matches(text: str, storage: Storage | None, error: type[PenstockError]) -> list[tuple[str, Stat | None]]:
    if not text:
        raise ConfigError(
            "no source given: a name is empty. Pass a path or a URL (check for '::' without a name on one side)"
        )
    path = path_of(text)
    if path is not None:
        if not glob.has_magic(path) or os.path.lexists(path):
            return [(path, None)]
        found: Sequence[tuple[str, Stat | None]] = [(one, None) for one in sorted(glob.glob(path, recursive=True))]
    elif is_remote(text) and scheme(text) not in WEB and any(sign in text for sign in "*["):
        # Web servers cannot be listed, and a question mark begins a query.
        from penstock.storage.remote import list_objects

        found = list_objects(text, storage=storage)
    else:
        return [(text, None)]
    sources = [(name, stat) for name, stat in found if not name.endswith(_INDEXES)]
    if not sources:
        raise error(f"no file matches {text}")
    return sources


def _exists(text: str) -> bool:
    """Return whether a name that looks like several is one local file."""
    if _SIGNS.search(text) is None:
        return True
    path = path_of(text)
    return path is not None and os.path.lexists(path)


def braces(text: str) -> list[str]:
    """Return a text with its braces expanded, as in a shell.

    Supports ``{a,b}``, ``{000..010}`` (with leading zeros), ``{a..e}`` and ``{0..8..2}``, also nested. Other braces, as
    in ``{x}``, are left unchanged, and so are braces after a backslash.

    Raises:
        ConfigError: unbalanced braces, or more than a million results.
    """
    if "{" not in text and "}" not in text:
        return [text]
    from braceexpand import braceexpand

    try:
        many = [abs(int(first) - int(last)) // max(int(step or 1), 1) + 1 for first, last, step in _RANGE.findall(text)]
        # Without nesting, the lists multiply, too; counting what they expand to would take a minute.
        if _NESTED.search(text) is None:
            many += [inside.count(",") + 1 for inside in _LIST.findall(text)]
        if max(many, default=0) > _LARGEST or (_NESTED.search(text) is None and math.prod(many) > _LARGEST):
            raise ConfigError(f"{text[:100]!r} expands to more than {_LARGEST:,} names")
        found = list(islice(braceexpand(text), _LARGEST + 1))
    except ConfigError:
        raise
    except RecursionError:
        raise ConfigError(f"braces are nested too deeply in {text[:100]!r}...") from None
    except ValueError:
        raise ConfigError(f"unbalanced braces in {text!r}") from None
    if len(found) > _LARGEST:
        raise ConfigError(f"{text!r} expands to more than {_LARGEST:,} names")
    return found


def without_query(name: str) -> str:
    """Return a name without the query of an address, to compare its ending; local names may have question marks."""
    return path_of(name) or name.partition("?")[0]


def with_versions(
    found: Sequence[tuple[str, Stat | None]], storage: Storage | None = None
) -> list[tuple[str, Stat | None]]:
    """Return objects of a store with the versions that they have now, so that later reads notice another one.

    Up to 48 objects are looked up by themselves, all at once. For more, their folders are listed, which takes one
    request for 1,000 objects. The version stays unknown for more objects of a web server, which cannot list them, or of
    a store that refuses to, and for objects that do not exist: the first read determines it. StorageUnavailableError:
    the store does not answer.
    """
    from penstock.storage.remote import RemoteSource, list_objects
    from penstock.storage.stream import SMALL_REQUESTS, in_threads

    unknown = [url for url, stat in found if stat is None]
    are_few = len(unknown) <= SMALL_REQUESTS

    def known_at(place: str) -> dict[str, Stat]:
        try:
            if are_few:
                return {place: RemoteSource(place, storage).stat}
            return dict(list_objects(f"{place}/*", storage=storage))
        except StorageUnavailableError:
            raise
        except StorageError:  # raised again when the object is read; or no permission to list
            return {}

    folders = {url.rpartition("/")[0] for url in unknown if scheme(url) not in (*WEB, "ais")}
    known: dict[str, Stat] = {}
    for some in in_threads(known_at, unknown if are_few else sorted(folders)):
        known |= some
    return [(url, known.get(url) if stat is None else stat) for url, stat in found]
