"""Samples of whole windows against samples of members one by one: the same, and the same errors."""

from __future__ import annotations

import io
import random
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from full_run import full_only
from hypothesis import given
from hypothesis import strategies as st
from interpreter_support import FULL
from pairwise import each_value
from shard_support import FORMATS, make_tar, mutated, samples

from penstock.shards.archive import Archive
from penstock.shards.grouping import Handler, Sample, group
from penstock.shards.runs import scan_runs
from penstock.shards.tar import Member, member_at, walk, walk_stream
from penstock.shards.window import Members, scan
from penstock.storage.files import SHARD, File

PARTS = st.text(st.sampled_from("ab_.é\n"), min_size=0, max_size=5)
NAMES = st.builds(
    lambda parts, extension, long: ("x" * long + "/".join(parts) + extension).strip("/") or "n.a",
    st.lists(PARTS, min_size=1, max_size=3),
    st.sampled_from([".jpg", ".JPG", ".seg.png", ".cls", "", ".long-extension", "."]),
    st.sampled_from([0, 0, 0, 95, 98, 99, 100, 101, 150]),
)

Select = Callable[[str], bool]


def outcome(iterate: Any) -> tuple[list[Any], tuple[type, str] | None]:
    got = []
    try:
        for item in iterate:
            got.append(item)  # noqa: PERF402
    except Exception as error:
        return got, (type(error), str(error))
    return got, None


def anything(name: str) -> bool:
    return True


def some(name: str) -> bool:
    return crc32(name.encode("utf-8", "surrogateescape")) % 3 > 0


def slow(data: bytes, handler: Handler | None = None, select: Select = anything) -> Any:
    pairs = ((m, data[m.offset : m.offset + m.size]) for m in walk(data, "u") if select(m.name))
    return outcome(group(pairs, "u", handler=handler))


def fast(data: bytes, handler: Handler | None = None, select: Select | None = None) -> Any:
    archive = Archive(data)
    runs = scan_runs(archive, "u", handler=handler, select=select)
    return outcome(s for run in runs for s in run.samples(archive, "u"))


def stepwise(data: bytes) -> Iterator[Member]:
    """Members, none of them found in a window."""
    archive, position = Archive(data), 0
    while (member := member_at(archive, "u", position)) is not None:
        yield member
        position = member.end


def members(found: Members) -> list[tuple[Any, ...]]:
    """What arrays say of members; they know regular files, and others."""
    numbers = (found.offset, found.size, found.header, found.end)
    return list(
        zip(
            map(found.name, range(found.total)), (found.kind == 0).tolist(), *(a.tolist() for a in numbers), strict=True
        )
    )


def check(data: bytes) -> None:
    one_by_one = outcome(stepwise(data))
    assert outcome(walk(data, "u")) == one_by_one
    assert outcome(m for m, _ in walk_stream(io.BytesIO(data), "u")) == one_by_one
    in_windows = outcome(row for found in scan(Archive(data), "u") for row in members(found))
    assert in_windows == (
        [(m.name.encode("utf-8", "surrogateescape"), m.kind == "file", *m[2:]) for m in one_by_one[0]],
        one_by_one[1],
    )
    for handler in (None, lambda e: True, lambda e: False):
        expected, got = slow(data, handler), fast(data, handler)
        assert got == expected
        assert [list(s) for s in got[0]] == [list(s) for s in expected[0]]
        assert fast(data, handler, some) == slow(data, handler, some)


@given(
    members=st.lists(st.tuples(NAMES, st.binary(max_size=1100)), max_size=30),
    format=st.sampled_from(["gnu", "pax"]),
    mtime=st.sampled_from([0, 1.5]),
)
def test_equals_the_walk(members: list[tuple[str, bytes]], format: str, mtime: float) -> None:
    check(make_tar(members, format=FORMATS[format], mtime=mtime))


@pytest.mark.parametrize(
    ("format", "mtime", "extensions"),
    each_value(FORMATS, [0, 1.5], [("jpg",), ("jpg", "cls"), ("a", "b", "c"), ("seg.png", "longextension")]),
)
def test_many_windows(format: str, mtime: float, extensions: tuple[str, ...]) -> None:
    if format != "pax" and mtime:
        mtime = 5
    check(make_tar(samples(900, extensions), format=FORMATS[format], mtime=mtime))


def test_samples_that_differ() -> None:
    members = samples(300, ("jpg",)) + samples(300, ("jpg", "cls"), prefix="t") + samples(50, ("x", "y"), prefix="u/")
    members += [("README", b"1"), ("__meta__/a.b", b""), ("d/", b""), *samples(200, ("cls",), prefix="v.")]
    check(make_tar(members, format=tarfile.GNU_FORMAT))


def test_archives_within_members_are_data() -> None:
    inner = make_tar(samples(40, size=300), format=tarfile.USTAR_FORMAT)
    members = [(f"a{i}.tar", inner if i % 2 else b"x") for i in range(30)]
    check(make_tar(members, format=tarfile.USTAR_FORMAT))


@full_only("much memory")
def test_one_huge_sample() -> None:
    check(make_tar([(f"a.{i}", b"x") for i in range(5000)]))


def test_names_with_rubbish_behind_their_end() -> None:
    data = bytearray(make_tar([("a.jpg", b"1"), ("a.cls", b"2")], format=tarfile.USTAR_FORMAT))
    data[20:25] = b".rub/"
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data[:512])
    check(bytes(data))


@pytest.mark.parametrize("format", ["v7", "gnu", "oldgnu", "posix", "ustar"])
def test_gnu_tar(tmp_path: Path, format: str) -> None:
    for i in range(200):
        (tmp_path / f"f{i:03d}.jpg").write_bytes(b"x" * (i * 7))
        (tmp_path / f"f{i:03d}.cls").write_bytes(b"1")
    names = sorted(path.name for path in tmp_path.iterdir())
    archive = tmp_path / "out.tar"
    subprocess.run(["tar", f"--format={format}", "-C", tmp_path, "-cf", archive, *names], check=True)
    check(archive.read_bytes())


def test_cuts() -> None:
    data = make_tar(samples(20, size=900), mtime=1.5)
    for length in range(0, len(data), 256 if FULL else 768):
        check(data[:length])


@full_only("hundreds of archives for each", but=["ustar-False", "gnu-True", "pax-False"])
@pytest.mark.parametrize("seal", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_mutated_headers(format: str, seal: bool) -> None:
    members = [*samples(6, size=700), ("n" * 150 + ".x", b"long")] if format != "ustar" else samples(6, size=700)
    data = make_tar(members, format=FORMATS[format], mtime=1.5 if format == "pax" else 1)
    headers = [b for m in walk(data, "x") for b in range(m.header, m.offset, 512)]
    rng = random.Random(format)
    for _ in range(600 if FULL else 80):
        check(mutated(data, rng, lambda r: r.choice(headers) + r.randrange(512), seal=seal))


def far_apart(format: str) -> list[tuple[str, bytes]]:
    """Members so large that only their headers are looked for, with small and odd ones between them."""
    rng = random.Random(format)
    members: list[tuple[str, bytes]] = []
    for i in range(36):
        long = "n" * 120 if format != "ustar" and i % 9 == 5 else "n"
        members.append((f"{long}{i:03d}.jpg", rng.randbytes(rng.choice([9000, 40_000, 70_001]))))
        members.append((f"{long}{i:03d}.cls", str(i).encode() * (i % 3) * 40))
        if i % 7 == 3:
            members += [(f"folder{i}/", b""), ("README", b"x" * 300)]
    return members


@full_only("large archives for each", but=["ustar-0", "gnu-1.5", "pax-0"])
@pytest.mark.parametrize("mtime", [0, 1.5])
@pytest.mark.parametrize("format", FORMATS)
def test_members_that_are_far_apart(tmp_path: Path, format: str, mtime: float) -> None:
    data = make_tar(far_apart(format), format=FORMATS[format], mtime=mtime if format == "pax" else int(mtime))
    check(data)
    path = tmp_path / "a.tar"
    path.write_bytes(data)
    archive = Archive(File(str(path), SHARD))
    assert [s for run in scan_runs(archive, "u") for s in run.samples(archive, "u")] == slow(data)[0]
    rng = random.Random(1)
    headers = [b for m in walk(data, "x") for b in range(m.header, m.offset, 512)]
    for length in [*rng.sample(range(len(data)), 12), headers[-1] + 100, headers[-1] + 512, len(data) - 9000]:
        check(data[:length])
    for _ in range(20):
        check(mutated(data, rng, lambda r: r.choice(headers[9:]) + r.randrange(512), seal=rng.random() < 0.5))


def test_a_header_in_the_last_block() -> None:
    large = [(f"a{i}.jpg", b"x" * 300_000) for i in range(3)]
    data = make_tar([("first.cls", b""), *large, ("last.cls", b"")], format=tarfile.USTAR_FORMAT, end=False)
    found = [row[0] for part in scan(Archive(data), "u", require_end=False) for row in members(part)]
    assert found == [b"first.cls", b"a0.jpg", b"a1.jpg", b"a2.jpg", b"last.cls"]
    check(data)


@pytest.mark.parametrize("size", [600, 12_000])
def test_a_file_equals_its_bytes(tmp_path: Path, size: int) -> None:
    data = make_tar(samples(500, ("jpg", "txt", "cls") if size == 600 else ("jpg", "cls"), size=size), mtime=1.5)
    path = tmp_path / "a.tar"
    path.write_bytes(data)
    archive = Archive(File(str(path), SHARD))
    assert [s for run in scan_runs(archive, "u") for s in run.samples(archive, "u")] == slow(data)[0]


def test_joining_names_of_several_widths() -> None:
    def members_of(files: list[tuple[str, bytes]]) -> Members:
        return Members.of(list(walk(make_tar(files), "u")))

    whole = members_of(samples(3))
    joined = Members.join([whole, members_of([("n" * 120 + ".x", b"")]), whole])
    assert joined.total == 13
    assert joined.name(6) == b"n" * 120 + b".x"
    assert joined.name(12) == joined.name(5) == b"s00002.cls"
    assert members(joined)[:6] == members(whole)


def test_start_in_the_middle() -> None:
    data = make_tar(samples(10), mtime=1.5)
    archive = Archive(data)
    header = next(iter(scan_runs(archive, "u"))).files.header[8]
    got: list[Sample] = [s for run in scan_runs(archive, "u", start=int(header)) for s in run.samples(archive, "u")]
    assert [s["__key__"] for s in got] == [f"s{i:05d}" for i in range(4, 10)]
    assert io.BytesIO(data).read(1)
