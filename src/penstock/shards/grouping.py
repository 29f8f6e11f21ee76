"""From members to samples, by WebDataset's rules.

    train/0001.jpg, train/0001.seg.png, train/0001.cls   ->   {"__key__": "train/0001", "__url__": "a.tar",
                                                               "jpg": b"...", "seg.png": b"...", "cls": b"7"}

* The key is the name up to the first dot after the last slash, the rest is the extension, in lower case.
* *Consecutive* members with the same key are one sample; the same key later in the shard is another one.
* An extension that comes twice in a sample is an error. Names without a dot are left out, and so are those that begin
  with ``__name__`` (metadata). Folders and links are no components.
* A sample never reaches over the end of a shard, and one that was cut off is never handed out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from penstock.errors import ShardError
from penstock.shards.members import Member
from penstock.storage.urls import shown

__all__ = ["KEY", "LOCAL_PATH", "URL", "Handler", "Sample", "base_and_extension", "duplicate", "group", "split_name"]

Sample = dict[str, Any]
"""``__key__`` and ``__url__`` (str), perhaps ``__local_path__`` (str), and ``bytes`` under each extension."""

Handler = Callable[[Exception], bool]
"""What to do about an error: True goes on without the member, False ends the shard, raising raises."""

KEY, URL, LOCAL_PATH = "__key__", "__url__", "__local_path__"


def base_and_extension(name: str) -> tuple[str, str] | None:
    """Key and extension of a name, as it is written there; None if it is no component's.

    >>> base_and_extension("a/b.c/d.e.f")
    ('a/b.c/d', 'e.f')
    >>> base_and_extension("README")
    """
    begin = name.rfind("/") + 1
    dot = name.find(".", begin)
    if dot < 0:
        return None
    if dot == begin or "\n" in name:
        return _unusual(name, begin, dot)
    return name[:dot], name[dot + 1 :]


def _unusual(name: str, begin: int, dot: int) -> tuple[str, str] | None:
    """For hidden files and line feeds: the key's last part has no dot, but may hold slashes, so ``a/.b`` is ``a/`` and
    ``b``; what comes before that part has no line feed.
    """
    part = 0
    while part < dot:
        if "." not in name[part:dot]:
            return name[:dot], name[dot + 1 :]
        slash = name.find("/", part)
        if slash < 0 or "\n" in name[part:slash]:
            return None
        part = slash + 1
    return None


def split_name(name: str) -> tuple[str, str] | None:
    """Key and lower-case extension of a member's name; None for metadata (``__x__``) and names without extension."""
    if name.startswith("__") and _is_metadata(name):
        return None
    found = base_and_extension(name)
    return None if found is None else (found[0], found[1].lower())


def _is_metadata(name: str) -> bool:
    first, slash, _ = name.partition("/")
    return first.endswith("__") and (not slash or len(first) >= 4)


def group(
    members: Iterable[tuple[Member, Any]],
    url: str,
    *,
    local_path: str | None = None,
    handler: Handler | None = None,
) -> Iterator[Sample]:
    """The samples of one shard.

    Args:
        members: members in order with their data, as `walk_stream` gives them. Data may be anything (a memoryview).
        url: what ``__url__`` is to say.
        local_path: what ``__local_path__`` is to say, where the shard is a local file.
        handler: asked about an extension that comes twice; without it that raises.

    Raises:
        ShardError: an extension comes twice in a sample.

    What ``members`` raises goes through, and the sample that was being put together is dropped.
    """
    sample: Sample = {}
    current: str | None = None
    for member, data in members:
        if member.kind != "file":
            continue
        parts = split_name(member.name)
        if parts is None:
            continue
        key, extension = parts
        if key != current:
            if sample:
                yield sample
            sample = {KEY: key, URL: url}
            current = key
            first = True
        else:
            first = False
        if extension in sample:
            error = duplicate(member.name, extension, sample, url, member.header)
            if handler is None:
                raise error
            if handler(error):
                continue
            return
        sample[extension] = data
        if first and local_path is not None:
            sample[LOCAL_PATH] = local_path
    if sample:
        yield sample


def duplicate(name: str, extension: str, sample: Iterable[str], url: str, at: int) -> ShardError:
    """The error about an extension that comes twice."""
    there = [other for other in sample if other != LOCAL_PATH]
    return ShardError(
        f"{name}: duplicate file name in tar file {extension} {there}; {shown(url)}: byte {at}: give every "
        "sample a key of its own (the name up to its first dot)"
    )
