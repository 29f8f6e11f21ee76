"""The index of a shard and sets of shards: exact, atomic, never trusted when it does not fit."""

from __future__ import annotations

import gzip
import multiprocessing
import os
import pickle
import random
import resource
import time
from pathlib import Path

import pytest
from busy_support import HANG
from full_run import full_only
from shard_support import make_tar, samples, write_shards

from penstock.errors import ConfigError, ShardChangedError, ShardError, ShardIOError, TruncatedShardError
from penstock.shards import ShardSet
from penstock.shards.grouping import group
from penstock.shards.index import BODY, ShardIndex, load_or_build
from penstock.shards.tar import walk


def older(path: str | Path, seconds: float = 3600) -> None:
    status = os.stat(path)
    then = status.st_mtime_ns - int(seconds * 1e9)
    os.utime(path, ns=(then, then))


@pytest.fixture
def shards(tmp_path: Path) -> list[str]:
    paths = write_shards(tmp_path, [7, 1, 0, 12], mtime=1.5)
    for path in paths:
        older(path)
    return paths


def everything(paths: list[str]) -> list[dict[str, object]]:
    result: list[dict[str, object]] = []
    for path in paths:
        data = Path(path).read_bytes()
        result += group(((m, data[m.offset : m.offset + m.size]) for m in walk(data, path)), path)
    return result


def test_equals_the_walk(shards: list[str]) -> None:
    whole = everything(shards)
    opened = ShardSet(shards)
    assert len(opened) == 20
    assert opened.counts == [7, 1, 0, 12]
    assert list(opened) == whole
    assert [opened[i] for i in range(-20, 20)] == whole + whole
    assert opened.records([19, 0, 7, 7, -1]) == [whole[i] for i in (19, 0, 7, 7, -1)]
    assert opened.records([]) == []
    assert [opened.key(i) for i in range(20)] == [f"d/k{i:06d}" for i in range(20)]
    for i in (20, -21):
        with pytest.raises(IndexError):
            opened[i]
        with pytest.raises(IndexError):
            opened.records([i])


def test_spans_are_whole_archives_of_one_sample(shards: list[str]) -> None:
    index = load_or_build(shards[3])
    data = Path(shards[3]).read_bytes()
    for i in range(12):
        begin, end = index.span(i)
        names = [m.name for m in walk(data[begin:end], "x", require_end=False)]
        assert names == [f"d/k{i + 8:06d}.jpg", f"d/k{i + 8:06d}.cls"]


def test_patterns_and_braces(shards: list[str], tmp_path: Path) -> None:
    assert len(ShardSet(str(tmp_path / "s-{0000,0003}.tar"))) == 19
    assert len(ShardSet(f"{tmp_path}/s-*.tar")) == 20
    assert len(ShardSet(Path(shards[0]))) == 7
    with pytest.raises(ShardIOError, match="no such file"):
        ShardSet(str(tmp_path / "s-000{0..9}.tar"))
    with pytest.raises(ConfigError):
        ShardSet([])
    with pytest.raises(ShardIOError, match="neither a file"):
        ShardSet("pipe:cat a.tar")
    with pytest.raises(ShardIOError, match="this is a folder; name a file in it, or a pattern"):
        ShardSet(str(tmp_path))


def test_it_is_built_once_and_again_when_the_shard_changes(shards: list[str]) -> None:
    ShardSet(shards)
    index = Path(shards[0] + ".pidx")
    before = index.stat().st_mtime_ns, index.stat().st_ino
    ShardSet(shards)
    assert (index.stat().st_mtime_ns, index.stat().st_ino) == before
    Path(shards[0]).write_bytes(make_tar(samples(3)))
    assert len(ShardSet(shards)) == 16


def test_no_damage_is_trusted(shards: list[str]) -> None:
    whole = everything(shards[:1])
    path = Path(shards[0] + ".pidx")
    load_or_build(shards[0])
    good = path.read_bytes()
    rng = random.Random(0)
    damages = [good[:n] for n in (0, 50, BODY, len(good) - 1)] + [good + b"\0", b"x" * len(good)]
    for _ in range(150):
        changed = bytearray(good)
        changed[rng.randrange(len(good))] ^= 1 << rng.randrange(8)
        damages.append(bytes(changed))
    for damage in damages:
        path.write_bytes(damage)
        loaded = ShardIndex.load(path)
        assert loaded is None or path.read_bytes()[88:BODY] != good[88:BODY]  # filling behind the header is not read
        assert list(ShardSet(shards[:1])) == whole
    assert path.read_bytes() == good


def test_read_only_folders_use_the_cache(shards: list[str], tmp_path: Path) -> None:
    index = load_or_build(shards[0], cache_dir=str(tmp_path / "elsewhere"))
    assert index.path.parent == tmp_path / "elsewhere"
    assert not Path(shards[0] + ".pidx").exists()
    assert len(ShardSet(shards, cache_dir=tmp_path / "elsewhere")) == 20


def test_bad_shards_have_no_index(tmp_path: Path) -> None:
    data = make_tar(samples(5))
    path = tmp_path / "a.tar"
    for content, error, message in (
        (data[:3000], TruncatedShardError, r"a\.tar: ends at byte"),
        (gzip.compress(data), ShardError, r"a\.tar: compressed \(gz\)"),
        (b"", TruncatedShardError, "empty file"),
        (make_tar([("a.b", b""), ("a.b", b"")]), ShardError, "duplicate file name"),
    ):
        path.write_bytes(content)
        older(path)
        with pytest.raises(error, match=message):
            ShardSet(path)
        assert not [name for name in os.listdir(tmp_path) if name != "a.tar"]


def test_changes_while_open(shards: list[str]) -> None:
    opened = ShardSet(shards)
    assert opened[0]
    data = Path(shards[0]).read_bytes()
    replaced = Path(shards[0] + ".new")
    replaced.write_bytes(make_tar(samples(2)))
    os.rename(replaced, shards[0])
    assert opened[0]["cls"] == b"0"  # the old file is still there for those who have it
    os.truncate(shards[3], 4000)
    with pytest.raises(ShardError, match="s-0003"):
        opened[19]
    Path(shards[3]).write_bytes(data)


def test_a_shard_replaced_before_it_is_first_read(shards: list[str]) -> None:
    opened = ShardSet(shards)
    Path(shards[0]).write_bytes(make_tar(samples(7)))
    older(shards[0], 10)
    with pytest.raises(ShardChangedError, match=r"s-0000\.tar"):
        opened[0]


def test_pickles_are_handles(shards: list[str]) -> None:
    opened = ShardSet(shards)
    text = pickle.dumps(opened)
    assert len(text) < 1000
    assert pickle.loads(text)[19] == opened[19]
    assert pickle.loads(text).fingerprint == opened.fingerprint
    Path(shards[0]).write_bytes(make_tar(samples(7)))
    with pytest.raises(ShardChangedError):
        pickle.loads(text)


def test_fingerprints(shards: list[str], tmp_path: Path) -> None:
    opened = ShardSet(shards)
    copy = tmp_path / "copy"
    copy.mkdir()
    copies = [str(copy / f"other-{k}.tar") for k in range(4)]
    for source, target in zip(shards, copies, strict=True):
        Path(target).write_bytes(Path(source).read_bytes())
    assert ShardSet(copies).fingerprint == opened.fingerprint
    assert ShardSet(copies[::-1]).fingerprint != opened.fingerprint
    fewer = ShardSet(shards[:2])
    assert opened.is_prefix_of_current(fewer.fingerprint, 8)
    assert not opened.is_prefix_of_current(fewer.fingerprint, 9)


def build(path: str, barrier: object) -> None:
    barrier.wait()  # type: ignore[attr-defined]
    assert len(load_or_build(path)) == 3000


def test_builders_wait_for_each_other(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(make_tar(samples(3000, size=300)))
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(3)
    processes = [context.Process(target=build, args=(str(path), barrier)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(HANG)
        assert process.exitcode == 0
    assert sorted(os.listdir(tmp_path)) == ["a.tar", "a.tar.pidx"]


@full_only("thousands of files")
def test_many_shards_need_few_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.storage.file_pool._limit", lambda: 200)
    paths = write_shards(tmp_path, [2] * 300)
    before = len(os.listdir("/proc/self/fd"))
    opened = ShardSet(paths)
    start = time.perf_counter()
    for i in range(600):
        assert opened[i]["cls"] == str(i).encode()
    assert time.perf_counter() - start < 30
    assert len(os.listdir("/proc/self/fd")) - before <= 2 * 100 + 5


def test_a_batch_out_of_more_shards_than_may_be_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = ShardSet(write_shards(tmp_path, [2] * 40))
    monkeypatch.setattr("penstock.storage.file_pool._limit", lambda: 16)
    rows = [*random.Random(1).sample(range(80), 80), 3, 3, -1]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = [os.dup(0) for _ in range(24)]
    for number in free:
        os.close(number)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(free) + 1, hard))
    try:
        found = shards.records(rows)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [int(sample["cls"]) for sample in found] == [row % 80 for row in rows]
    assert len({id(sample) for sample in found}) == len(rows)


def test_a_change_in_the_middle_of_a_shard_is_noticed(tmp_path: Path) -> None:
    path = write_shards(tmp_path, [90])[0]
    right = [sample["cls"] for sample in ShardSet(path)]
    samples_of, had = iter(ShardSet(path)), []
    had.append(next(samples_of)["cls"])
    data = Path(path).read_bytes()
    with open(path, "r+b") as file:
        file.write(data.replace(b"89" + bytes(510), b"98" + bytes(510)))
    with pytest.raises(ShardChangedError, match="while it was open"):
        had += (sample["cls"] for sample in samples_of)
    assert had == right[: len(had)]
