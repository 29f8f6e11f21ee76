"""`read_ranges`: parts of objects in stores, with one request for neighbours, and several requests at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from penstock.storage.backend import Cancel
from penstock.storage.parallel_requests import ObjectsAhead
from penstock.storage.remote import RemoteSource

__all__ = ["Range", "read_ranges"]

_GAP = 4 << 10  # up to this many unneeded bytes between ranges are read to save a request


class Range(NamedTuple):
    """The bytes ``[begin, end)`` of an object."""

    source: RemoteSource
    begin: int
    end: int


def read_ranges(wanted: Sequence[Range]) -> Iterator[bytes]:
    """Yield the bytes of ranges, in the given order.

    Args:
        wanted: the ranges. Those that follow each other in one object come by one request of at most `Storage.block`
            bytes, also with up to 4 KiB between two of them.

    Raises:
        StorageChangedError, StorageError: see `penstock.storage.RemoteSource`.

    Memory: up to 16 requests, or one range.
    """
    requests: list[list[Range]] = []
    for part in wanted:
        last = requests[-1] if requests else []
        if (
            last
            and last[0].source is part.source
            and last[-1].begin <= part.begin <= last[-1].end + _GAP
            and part.end - last[0].begin <= part.source.storage.block
        ):
            last.append(part)
        else:
            requests.append([part])
    deadline = max((part.source.storage.deadline for part in wanted), default=0.0)
    with ObjectsAhead(requests, _read, deadline=deadline) as ahead:
        for parts in requests:
            data, first = ahead.next(), parts[0].begin
            for part in parts:
                yield data[part.begin - first : part.end - first]


def _read(parts: list[Range], cancel: Cancel) -> bytes:
    source, begin, end = parts[0].source, parts[0].begin, max(part.end for part in parts)
    if end - begin > source.storage.block or not source.stat.ranged:
        return source.read_at(begin, end - begin)
    return bytes(source.fetch(begin, end, cancel))
