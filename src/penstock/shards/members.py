"""Members of a tar archive: a single `Member`, or many as arrays (`Members`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.shards.header import decode_name

__all__ = ["DIR", "FILE", "KINDS", "NO_MEMBERS", "Bytes", "Ints", "Kind", "Member", "Members", "texts"]

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

Kind = Literal["file", "dir", "link", "special"]
KINDS: tuple[Kind, ...] = ("file", "dir", "link", "special")
FILE, DIR = 0, 1


class Member(NamedTuple):
    """One member: ``size`` bytes of data at ``offset``, its first header (extended ones included) at ``header``.

    ``end`` is the first byte after its padding, where the next member begins.
    """

    name: str
    kind: Kind
    offset: int
    size: int
    header: int
    end: int


class Members(NamedTuple):
    """Members of an archive in order, as arrays.

    ``names`` has a zero-padded row of bytes for each name; ``lengths`` are the lengths of the names; ``kind`` holds
    indices into `KINDS`. The other fields are as in `Member`.
    """

    names: Bytes
    lengths: Ints
    kind: Bytes
    header: Ints
    offset: Ints
    size: Ints
    end: Ints

    @property
    def total(self) -> int:
        """The number of members."""
        return len(self.header)

    def name(self, index: int) -> bytes:
        """Return one name."""
        return self.names[index, : self.lengths[index]].tobytes()

    def take(self, which: slice | npt.NDArray[np.bool_]) -> Members:
        """Return a selection of the members."""
        return Members(*(array[which] for array in self))  # type: ignore[arg-type]

    def files(self) -> Members:
        """Return the members that are regular files."""
        return self.take(self.kind == FILE) if self.kind.any() else self

    def one_by_one(self) -> Iterator[Member]:
        """Yield the members one by one."""
        names, kinds = texts(self.names, self.lengths), map(KINDS.__getitem__, self.kind.tolist())
        numbers = (array.tolist() for array in (self.offset, self.size, self.header, self.end))
        return map(Member._make, zip(names, kinds, *numbers, strict=True))

    @staticmethod
    def join(parts: Iterable[Members]) -> Members:
        """Return the concatenation of these members."""
        parts = [part for part in parts if part.total]
        if len(parts) < 2:
            return parts[0] if parts else NO_MEMBERS
        width = max(part.names.shape[1] for part in parts)
        names = np.zeros((sum(part.total for part in parts), width), np.uint8)
        row = 0
        for part in parts:
            names[row : row + part.total, : part.names.shape[1]] = part.names
            row += part.total
        return Members(names, *(np.concatenate(arrays) for arrays in list(zip(*parts, strict=True))[1:]))

    @staticmethod
    def of(members: list[Member]) -> Members:
        """Return members as arrays."""
        raw = [member.name.encode("utf-8", "surrogateescape") for member in members]
        width = max(map(len, raw), default=0) + 1
        names = np.frombuffer(b"".join(name.ljust(width, b"\0") for name in raw), np.uint8).reshape(len(raw), width)
        lengths = np.fromiter(map(len, raw), np.int64, len(raw))
        kind = np.fromiter((KINDS.index(member.kind) for member in members), np.uint8, len(raw))
        rest = np.array([(m.header, m.offset, m.size, m.end) for m in members], np.int64).reshape(-1, 4).T
        return Members(names, lengths, kind, *rest)


NO_MEMBERS = Members.of([])


def texts(rows: Bytes, lengths: Ints) -> list[str]:
    """Return names as text: the first ``lengths[i]`` bytes of each row."""
    raw, width = rows.tobytes(), rows.shape[1]
    spans = zip(range(0, len(raw), width), lengths.tolist(), strict=True)
    if raw.isascii():
        text = raw.decode("ascii")
        return [text[start : start + length] for start, length in spans]
    return [decode_name(raw[start : start + length]) for start, length in spans]
