"""Our tar reader against the standard library's and GNU tar's archives, and against damage."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import random
import subprocess
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard
from full_run import full_only
from hypothesis import given
from hypothesis import strategies as st
from shard_support import FORMATS, by_tarfile, make_tar, mutated, reseal, samples

from penstock.errors import ShardError, ShardIOError, TruncatedShardError
from penstock.shards.compressed import open_stream
from penstock.shards.tar import walk, walk_stream

NAMES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=40).filter(
    lambda name: not name.endswith("/") and name.strip("/")
)
LONG = st.builds(lambda a, n: (a * n)[:300], NAMES, st.integers(1, 30)).filter(lambda n: not n.endswith("/"))


def read(data: bytes) -> list[tuple[str, bytes]]:
    """Files by both of our ways, which must agree."""
    mapped = [(m.name, data[m.offset : m.offset + m.size]) for m in walk(data, "x.tar") if m.kind == "file"]
    streamed = [(m.name, d) for m, d in walk_stream(io.BytesIO(data), "x.tar") if m.kind == "file"]
    assert mapped == streamed
    return mapped


@given(
    members=st.lists(st.tuples(st.one_of(NAMES, LONG), st.binary(max_size=1200)), max_size=8),
    format=st.sampled_from(["gnu", "pax"]),
    mtime=st.sampled_from([0, 1234567890, 1234567890.123]),
)
def test_equals_tarfile(members: list[tuple[str, bytes]], format: str, mtime: float) -> None:
    data = make_tar(members, format=FORMATS[format], mtime=mtime)
    assert read(data) == by_tarfile(data)


@pytest.mark.parametrize("format", FORMATS)
def test_prefix_and_folders(format: str) -> None:
    deep = "d" * 90 + "/" + "e" * 60 + "/name.jpg"
    data = make_tar([("a/", b""), (deep, b"x" * 513), ("b.txt", b"")], format=FORMATS[format])
    assert read(data) == by_tarfile(data) == [(deep, b"x" * 513), ("b.txt", b"")]
    assert [m.kind for m in walk(data, "x")] == ["dir", "file", "file"]


@pytest.mark.parametrize("format", ["v7", "ustar", "gnu", "oldgnu", "posix"])
def test_gnu_tar(tmp_path: Path, format: str) -> None:
    folder = tmp_path / "in"
    (folder / "sub").mkdir(parents=True)
    for i in range(20):
        (folder / "sub" / f"f{i:03d}.jpg").write_bytes(os.urandom(i * 300))
    if format not in ("v7", "ustar"):
        (folder / "sub" / ("long" * 40 + ".txt")).write_bytes(b"long")
    (folder / "sub" / "link.jpg").symlink_to("f001.jpg")
    os.link(folder / "sub" / "f002.jpg", folder / "sub" / "hard.jpg")
    archive = tmp_path / "out.tar"
    subprocess.run(["tar", f"--format={format}", "-C", folder, "-cf", archive, "sub"], check=True)
    data = archive.read_bytes()
    ours = dict(read(data))
    # The second name of a file is a link, to whichever came first, and tarfile calls it no regular file either.
    assert ours == dict(by_tarfile(data))
    assert len(ours) >= 20
    assert {m.kind for m in walk(data, "x")} == {"dir", "file", "link"}


def test_a_header_that_begins_with_extended_ones_is_their_first_byte() -> None:
    data = make_tar([("a.x", b"1"), ("l" * 200, b"2")], format=tarfile.GNU_FORMAT)
    first, second = walk(data, "x")
    assert (first.header, first.offset, first.end) == (0, 512, 1024)
    assert second.header == 1024
    assert second.offset == 1024 + 512 * 3
    assert [m.name for m in walk(data, "x", start=1024)] == ["l" * 200]


@pytest.mark.parametrize("size", [8 << 30, (1 << 61) + 5])
@pytest.mark.parametrize("way", ["base256", "pax"])
def test_large_sizes(size: int, way: str) -> None:
    info = tarfile.TarInfo("big.bin")
    info.size = size
    header = info.tobuf(tarfile.GNU_FORMAT if way == "base256" else tarfile.PAX_FORMAT)
    with pytest.raises(TruncatedShardError, match=rf"big.bin.*{size} bytes"):
        list(walk(header, "x.tar"))
    with pytest.raises(TruncatedShardError, match=r"x.tar: ends at byte"):
        list(walk_stream(io.BytesIO(header), "x.tar"))


def test_negative_and_senseless_sizes() -> None:
    for field in (b"\xff" * 12, b"-0000000001\0", b"0000_000001\0", b"00000000009\0", b"\xc0" + b"\0" * 11):
        block = bytearray(make_tar([("a.x", b"1")]))
        block[124:136] = field
        block[:512] = reseal(block[:512])
        with pytest.raises(ShardError, match=r"x.tar: byte 0: the header's size"):
            list(walk(bytes(block), "x.tar"))


def test_sparse_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "hole"
    with path.open("wb") as file:
        file.seek(1 << 20)
        file.write(b"end")
    for format in ("gnu", "posix"):
        archive = tmp_path / f"{format}.tar"
        subprocess.run(["tar", "--sparse", f"--format={format}", "-C", tmp_path, "-cf", archive, "hole"], check=True)
        with pytest.raises(ShardError, match="sparse"):
            list(walk(archive.read_bytes(), "x.tar"))


def test_every_cut_is_an_error_with_whole_members_before_it() -> None:
    data = make_tar(samples(4, size=900), end=False) + bytes(1024)
    whole = read(data)
    for length in range(0, len(data), 64):
        for way in (mapped_until_error, streamed_until_error):
            got, error = way(data[:length])
            assert got == whole[: len(got)]
            if length <= len(data) - 1024:
                assert isinstance(error, TruncatedShardError), length
                assert "x.tar" in str(error)
    got, error = mapped_until_error(data[:-512])  # one block of zeros is left: nothing is missing
    assert error is None
    assert got == whole


def mapped_until_error(data: bytes) -> tuple[list[tuple[str, bytes]], Exception | None]:
    got = []
    try:
        for m in walk(data, "x.tar"):
            got.append((m.name, data[m.offset : m.offset + m.size]))
    except ShardError as error:
        return got, error
    return got, None


def streamed_until_error(data: bytes) -> tuple[list[tuple[str, bytes]], Exception | None]:
    got = []
    try:
        for m, d in walk_stream(io.BytesIO(data), "x.tar"):
            got.append((m.name, d))
    except ShardError as error:
        return got, error
    return got, None


def test_a_cut_between_members_may_be_allowed() -> None:
    data = make_tar(samples(2), end=False)
    assert len(list(walk(data, "x", require_end=False))) == 4
    assert len(list(walk_stream(io.BytesIO(data), "x", require_end=False))) == 4
    with pytest.raises(TruncatedShardError, match="without the end mark"):
        list(walk(data, "x"))


def test_a_hole_is_no_end() -> None:
    data = bytearray(make_tar([("a.x", b"1"), ("b.x", b"2")]))
    data[1024:1536] = bytes(512)
    with pytest.raises(ShardError, match=r"byte 1024: a single block of zeros"):
        list(walk(bytes(data), "x"))


def test_select_leaves_data_out() -> None:
    data = make_tar(samples(3))
    got = list(walk_stream(io.BytesIO(data), "x", select=lambda name: name.endswith(".cls")))
    assert [m.name[-3:] for m, _ in got] == ["cls"] * 3


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "an empty file"),
        (b"\x1f\x8b" + bytes(600), "gzip file"),
        (b"<html>" + bytes(600), "HTML"),
        (b"x" * 600, "no tar"),
    ],
)
def test_no_archive(content: bytes, message: str) -> None:
    with pytest.raises(ShardError, match=message):
        list(walk(content, "x.tar"))


COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "tar": lambda data: data,
    "tar.gz": gzip.compress,
    "tgz": lambda data: gzip.compress(data[:5000]) + gzip.compress(data[5000:]),
    "tar.bz2": bz2.compress,
    "tar.xz": lzma.compress,
    "tar.zst": zstandard.compress,
    "x.zst": lambda data: zstandard.compress(data[:5000]) + zstandard.compress(data[5000:]),
}


@pytest.mark.parametrize("kind", COMPRESSORS)
def test_compressed(tmp_path: Path, kind: str) -> None:
    data = make_tar(samples(30))
    path = tmp_path / f"wrong-name-{kind}.bin"
    packed = COMPRESSORS[kind](data)
    path.write_bytes(packed)
    with open_stream(path) as file:
        assert [(m.name, d) for m, d in walk_stream(file, "x")] == by_tarfile(data)
    assert file.closed
    whole = by_tarfile(data)
    for length in {0, 1, 3, len(packed) // 3, len(packed) // 2, len(packed) * 2 // 3}:
        path.write_bytes(packed[:length])
        with open_stream(path) as file, pytest.raises(ShardError, match=r"x\.tar"):
            for number, (member, content) in enumerate(walk_stream(file, "x.tar")):
                assert (member.name, content) == whole[number]


DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    "tar.gz": lambda: zlib.decompressobj(31),
    "tar.bz2": bz2.BZ2Decompressor,
    "tar.xz": lzma.LZMADecompressor,
    "tar.zst": lambda: zstandard.ZstdDecompressor().decompressobj(),
}


@pytest.mark.parametrize("kind", DECOMPRESSORS)
def test_members_before_the_end_of_truncated_data(tmp_path: Path, kind: str) -> None:
    rng = random.Random(2)
    packed = COMPRESSORS[kind](make_tar([(f"{k:03}.bin", rng.randbytes(20_000)) for k in range(80)]))
    packed = packed[: len(packed) * 3 // 4]
    (tmp_path / "packed.tar").write_bytes(packed)
    (tmp_path / "plain.tar").write_bytes(DECOMPRESSORS[kind]().decompress(packed))
    found: dict[str, list[str]] = {"packed.tar": [], "plain.tar": []}
    for name, members in found.items():
        with open_stream(tmp_path / name) as file, pytest.raises(ShardError, match=name):
            members += (member.name for member, _ in walk_stream(file, name))
    assert found["packed.tar"] == found["plain.tar"]
    assert len(found["packed.tar"]) > 40


@pytest.mark.parametrize("kind", ["tar.gz", "tar.bz2", "tar.xz", "tar.zst"])
def test_damaged_compression(tmp_path: Path, kind: str) -> None:
    packed = bytearray(COMPRESSORS[kind](make_tar(samples(30))))
    rng = random.Random(1)
    for _ in range(60):
        changed = bytearray(packed)
        changed[rng.randrange(8, len(packed))] ^= 1 << rng.randrange(8)
        try:
            with open_stream(io.BytesIO(changed)) as file:
                for _ in walk_stream(file, "x.tar"):
                    pass
        except ShardError as error:
            assert "x.tar" in str(error)  # noqa: PT017


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ShardIOError, match="no such file"):
        open_stream(tmp_path / "none.tar")


@full_only("hundreds of archives for each", but=["pax-True", "gnu-False", "ustar-True"])
@pytest.mark.parametrize("seal", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_mutated_headers(format: str, seal: bool) -> None:
    """An error of ours, or what is there; never another exception, and always an end."""
    members = [*samples(3, size=700), ("n" * 150, b"long")] if format != "ustar" else samples(4, size=700)
    data = make_tar(members, format=FORMATS[format], mtime=1.5)
    headers = [b for m in walk(data, "x") for b in range(m.header, m.offset, 512)]
    rng = random.Random(format)
    for _ in range(1500):
        changed = mutated(data, rng, lambda r: r.choice(headers) + r.randrange(512), seal=seal)
        mapped, error = mapped_until_error(changed)
        streamed, error_too = streamed_until_error(changed)
        assert type(error) is type(error_too)
        assert [entry[0] for entry in mapped] == [entry[0] for entry in streamed]
