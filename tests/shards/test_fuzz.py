"""Many damaged headers: an error of ours or what is there, and always an end."""

from __future__ import annotations

import random
import tarfile

import pytest
from interpreter_support import FULL
from shard_support import FORMATS, make_tar, reseal

from penstock.errors import ShardError
from penstock.shards.archive import Archive
from penstock.shards.runs import scan_runs
from penstock.shards.tar import walk

ROUNDS = 34_000 if FULL else 3_000


@pytest.mark.parametrize("format", FORMATS)
def test_headers(format: str) -> None:
    names = ["a.jpg", "b/c.cls"] if format == "ustar" else ["a.jpg", "n" * 120 + ".cls"]
    data = make_tar([(name, b"x" * 600) for name in names], format=FORMATS[format], mtime=1.5 if format == "pax" else 1)
    whole = {m.name: data[m.offset : m.offset + m.size] for m in walk(data, "u")}
    blocks = [b for m in walk(data, "u") for b in range(m.header, m.offset, 512)]
    rng = random.Random(format)
    right = wrong = 0
    for number in range(ROUNDS):
        changed = bytearray(data)
        block = rng.choice(blocks)
        for _ in range(rng.randrange(1, 5)):
            changed[block + rng.randrange(512)] = rng.choice((0, 32, 48, 55, 120, 128, 255, rng.randrange(256)))
        if number % 2:
            changed[block : block + 512] = reseal(changed[block : block + 512])
        try:
            members = list(walk(bytes(changed), "u"))
            if number % 8 == 0:
                archive = Archive(bytes(changed))
                for run in scan_runs(archive, "u"):
                    list(run.samples(archive, "u"))
        except ShardError as error:
            wrong += 1
            assert "u: " in str(error)  # noqa: PT017
            continue
        right += 1
        assert len(members) <= 4
        for member in members:
            assert 0 <= member.header < member.offset <= member.end
            assert member.offset + member.size <= len(data)
            if not number % 2 and member.kind == "file" and member.name in whole:
                assert changed[member.offset : member.offset + member.size] == whole[member.name]
    assert right > ROUNDS // 340
    assert wrong > ROUNDS // 34


def test_random_bytes() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        data = rng.randbytes(rng.randrange(3000))
        with pytest.raises(ShardError):
            list(walk(data, "u"))


def test_an_archive_of_extended_headers_alone_ends() -> None:
    info = tarfile.TarInfo("x")
    info.type = b"L"
    data = info.tobuf(tarfile.GNU_FORMAT) * 3000
    with pytest.raises(ShardError):
        list(walk(data, "u"))
