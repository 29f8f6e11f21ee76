"""A stream that comes in any pieces gives what the whole archive gives: the same members, and the same errors."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from itertools import chain, repeat
from typing import Any, BinaryIO, cast
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st
from interpreter_support import FULL
from shard_support import FORMATS, make_tar, mutated, samples

from penstock.errors import ShardError
from penstock.shards.archive import Archive
from penstock.shards.tar import Member, member_at, walk, walk_stream

SIZES = st.lists(st.integers(1, 70_000), min_size=1, max_size=20)


class Pieces(io.RawIOBase):
    """A file that gives at most so many bytes a read, over and over; ``read1`` may give fewer than ``read``."""

    def __init__(self, data: bytes, sizes: list[int], *, has_read1: bool) -> None:
        self._file, self._sizes = io.BytesIO(data), chain.from_iterable(repeat(sizes))
        if has_read1:
            self.read1 = self.read
            self.read = self._file.read

    def read(self, count: int = -1) -> bytes:
        """Return some of what is asked for."""
        size = next(self._sizes)
        return self._file.read(size if count < 0 else min(size, count))


Found = tuple[list[tuple[Member, bytes]], tuple[type, str] | None]


def outcome(pairs: Iterator[tuple[Member, bytes]]) -> Found:
    got = []
    try:
        for pair in pairs:
            got.append(pair)  # noqa: PERF402
    except ShardError as error:
        return got, (type(error), str(error))
    return got, None


def stepwise(data: bytes) -> Iterator[tuple[Member, bytes]]:
    archive, position = Archive(data), 0
    while (member := member_at(archive, "u", position)) is not None:
        yield member, data[member.offset : member.offset + member.size] if member.kind == "file" else b""
        position = member.end


def in_pieces(data: bytes, sizes: list[int], *, has_read1: bool, **options: Any) -> Found:
    file = cast(BinaryIO, Pieces(data, sizes, has_read1=has_read1))
    return outcome(walk_stream(file, "u", **options))


def archive_of(kind: str, size: int, count: int) -> bytes:
    """An archive with files from empty ones to ``size``; of kind "long", every other name has a header of its own."""
    members = [(f"d{i % 3}/" + ("n" * 120 if kind == "long" and i % 2 else "") + f"{i}.x", b"") for i in range(count)]
    rng = random.Random(count)
    members = [(name, rng.randbytes(rng.choice((0, 1, size // 9, size)))) for name, _ in members]
    return make_tar(members, format=FORMATS["gnu" if kind == "long" else kind], mtime=1.5 if kind == "pax" else 1)


ARCHIVES = [
    archive_of(kind, size, count)
    for kind in ("ustar", "pax", "gnu", "long")
    for size, count in ((700, 300), (9000, 150), (150_000, 30))
]


@given(
    data=st.sampled_from(ARCHIVES),
    sizes=SIZES,
    has_read1=st.booleans(),
    cut=st.one_of(st.none(), st.floats(0, 1)),
)
def test_any_pieces(data: bytes, sizes: list[int], has_read1: bool, cut: float | None) -> None:
    if cut is not None:
        data = data[: int(len(data) * cut)]
    assert in_pieces(data, sizes, has_read1=has_read1) == outcome(stepwise(data))


@given(data=st.sampled_from(ARCHIVES), sizes=SIZES, has_read1=st.booleans(), seed=st.integers(0, 1000))
def test_any_selection(data: bytes, sizes: list[int], has_read1: bool, seed: int) -> None:
    def select(name: str) -> bool:
        return crc32(f"{seed}{name}".encode()) % 3 == 0

    got = in_pieces(data, sizes, has_read1=has_read1, select=select)
    assert got == ([(m, content) for m, content in stepwise(data) if m.kind != "file" or select(m.name)], None)


ROUNDS = 1500 if FULL else 150


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("count", [3, 40])
def test_damage(format: str, count: int) -> None:
    names = [f"{i}.jpg" if format == "ustar" or i % 5 else "n" * 120 + f"{i}.jpg" for i in range(count)]
    data = make_tar(
        [(name, b"x" * (37 * i)) for i, name in enumerate(names)],
        format=FORMATS[format],
        mtime=1.5 if format == "pax" else 1,
    )
    headers = [b for m in walk(data, "u") for b in range(m.header, m.offset, 512)]
    rng = random.Random(format)
    wrong = 0
    for number in range(ROUNDS):
        changed = mutated(data, rng, lambda r: r.choice(headers) + r.randrange(512), seal=bool(number % 2))
        sizes = [rng.choice((1, 511, 512, 513, 3000, 1 << 20)) if number % 4 else 1 << 20 for _ in range(5)]
        expected = outcome(stepwise(changed))
        assert in_pieces(changed, sizes, has_read1=number % 3 > 0) == expected
        assert outcome((m, b"") for m in walk(changed, "u")) == ([(m, b"") for m, _ in expected[0]], expected[1])
        wrong += expected[1] is not None
    assert wrong > ROUNDS // 8


def test_many_samples_in_small_pieces() -> None:
    data = make_tar(samples(700, size=600))
    for size in (100, 512, 4096, 65536):
        assert in_pieces(data, [size], has_read1=True) == outcome(stepwise(data))
