"""Group tar members into samples, by WebDataset's rules.

    train/0001.jpg, train/0001.seg.png, train/0001.cls   ->   {"__key__": "train/0001", "__url__": "a.tar",
                                                               "jpg": b"...", "seg.png": b"...", "cls": b"7"}

* The key is the name up to the first dot after the last slash; the rest is the extension, in lower case.
* *Consecutive* members with the same key form a sample; the same key later in the shard is another sample.
* A repeated extension in a sample is an error. Names without a dot are ignored, and so are metadata (``__name__``),
  folders and links.
* A sample never crosses the end of a shard, and a truncated sample is never returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from penstock.errors import ShardError
from penstock.shards.tar import Member
from penstock.storage.urls import shown

__all__ = [
    "KEY",
    "LOCAL_PATH",
    "URL",
    "Handler",
    "Sample",
    "base_and_extension",
    "duplicate",
    "group",
    "group_from",
    "split_name",
]

Sample = dict[str, Any]
"""``__key__`` and ``__url__`` (str), perhaps ``__local_path__`` (str), and ``bytes`` under each extension."""

Handler = Callable[[Exception], bool]
"""Handles an error: returns True to skip the member, False to end the shard, or raises."""

KEY, URL, LOCAL_PATH = "__key__", "__url__", "__local_path__"


def base_and_extension(name: str) -> tuple[str, str] | None:
    """Return key and extension of a member's name, in its own case; None if it is not part of a sample.

    >>> base_and_extension("a/b.c/d.e.f")
    ('a/b.c/d', 'e.f')
    >>> base_and_extension("README")
    """
    begin = name.rfind("/") + 1
    dot = name.find(".", begin)
    if dot < 0:
        return None
    if dot > begin and "\n" not in name:
        return name[:dot], name[dot + 1 :]
    # Hidden files, and names with line feeds, as WebDataset splits them: the last part of the key has no dot but may
    # have slashes, so ``a/.b`` is ``a/`` and ``b``; the part before it has no line feed.
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
    """Return key and lower-case extension of a member's name; None for metadata and names without extension."""
    if name.startswith("__"):
        first, slash, _ = name.partition("/")
        if first.endswith("__") and (not slash or len(first) >= 4):
            return None
    found = base_and_extension(name)
    return None if found is None else (found[0], found[1].lower())


def group(
    members: Iterable[tuple[Member, Any]],
    url: str,
    *,
    local_path: str | None = None,
    handler: Handler | None = None,
) -> Iterator[Sample]:
    """Yield the samples of one shard.

    Args:
        members: members in order with their data, as from `walk_stream`. Data may be of any type, such as memoryview.
        url: the value of ``__url__``.
        local_path: the value of ``__local_path__``, if the shard is a local file.
        handler: decides about a repeated extension; without it, that raises.

    Raises:
        ShardError: a repeated extension in a sample.

    Exceptions of ``members`` propagate, and the incomplete sample is dropped.
    """
    return (sample for _, sample in group_from(members, url, local_path=local_path, handler=handler))


def group_from(
    members: Iterable[tuple[Member, Any]],
    url: str,
    *,
    start: int = 0,
    local_path: str | None = None,
    handler: Handler | None = None,
) -> Iterator[tuple[int, Sample]]:
    """Yield what `group` yields of the members from the byte ``start`` on, each with the first byte of its headers."""
    sample: Sample = {}
    current: str | None = None
    header = 0
    for member, data in members:
        if member.kind != "file" or member.header < start:
            continue
        parts = split_name(member.name)
        if parts is None:
            continue
        key, extension = parts
        if key != current:
            if sample:
                yield header, sample
            sample = {KEY: key, URL: url}
            current, header = key, member.header
        if extension in sample:
            error = duplicate(member.name, extension, sample, url, member.header)
            if handler is None:
                raise error
            if handler(error):
                continue
            return
        sample[extension] = data
        if local_path is not None and len(sample) == 3:  # after its first file
            sample[LOCAL_PATH] = local_path
    if sample:
        yield header, sample


def duplicate(name: str, extension: str, sample: Iterable[str], url: str, at: int) -> ShardError:
    """Return the error about a repeated extension."""
    there = [other for other in sample if other != LOCAL_PATH]
    return ShardError(
        f"{name}: duplicate file name in tar file {extension} {there}; {shown(url)}: byte {at}: give every "
        "sample a key of its own (the name up to its first dot)"
    )
