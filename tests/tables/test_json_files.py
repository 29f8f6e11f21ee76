"""`JsonFiles` and `penstock.open` of JSON lines: round trips, odd and damaged files, indexes that several make."""

from __future__ import annotations

import errno
import gzip
import json
import math
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from loader_conformance import check_elastic, check_end_of_pass, check_resume
from loader_support import EXECUTORS

import penstock as ps
from penstock.errors import ConfigError, DataFileChangedError, DataFileError, ManifestError, PenstockError
from penstock.storage import cache_root
from penstock.tables import line_index

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

N = 61


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def in_frames(data: bytes, size: int = 100) -> bytes:
    """Several frames, which end anywhere within rows, with a skippable one between."""
    frames = [zstandard.compress(data[k : k + size]) for k in range(0, len(data), size)]
    return b"\x50\x2a\x4d\x18\x03\0\0\0abc".join(frames)


def unsized(data: bytes) -> bytes:
    """One frame as a stream makes it, whose header does not say how much it holds."""
    coder = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    return coder.compress(data) + coder.flush()


PACKED: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "plain": (".jsonl", bytes),
    "zstd": (".jsonl.zst", zstandard.compress),
    "stream": (".ndjson.zst", unsized),
    "frames": (".jsonl.zst", in_frames),
    "gzip": (".json.gz", gzip.compress),
    "members": (".jsonl.gz", lambda data: gzip.compress(data[:70]) + gzip.compress(data[70:])),
}


def lines(rows: list[Any], end: str = "\n") -> bytes:
    return "".join(json.dumps(row) + end for row in rows).encode()


def sample(k: int) -> dict[str, Any]:
    return {"number": k, "text": f"row {k}", "meta": {"tags": ["a"] * (k % 3)}}


def number(row: dict[str, Any]) -> int:
    assert row == sample(row["number"])
    return int(row["number"])


number.pure = True  # type: ignore[attr-defined]


@pytest.fixture(scope="module", params=PACKED)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """N rows in three files, one of them empty."""
    folder = tmp_path_factory.mktemp(request.param)
    ending, pack = PACKED[request.param]
    for k, (begin, end) in enumerate([(0, 40), (40, 40), (40, N)]):
        (folder / f"part-{k}{ending}").write_bytes(pack(lines([sample(i) for i in range(begin, end)])))
    return folder


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
objects = st.lists(st.dictionaries(st.text(max_size=5), values, max_size=4), min_size=1, max_size=30)


@settings(max_examples=15, deadline=None)
@given(objects, st.sampled_from([*PACKED]), st.sampled_from(["\n", "\r\n", "\n\n", " \n \t\r\n"]), st.data())
def test_round_trip(rows: list[Any], kind: str, end: str, data: st.DataObject) -> None:
    ending, pack = PACKED[kind]
    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        patch.setattr(line_index, "FRAME", data.draw(st.sampled_from([1, 50, 1 << 17])))
        patch.setattr(line_index, "LARGEST", data.draw(st.sampled_from([50, 1 << 20])))
        path = Path(place, f"a{ending}")
        text = data.draw(st.sampled_from([b"", b"\xef\xbb\xbf", b"\n \n"])) + lines(rows, end)
        path.write_bytes(pack(text.removesuffix(b"\n") if data.draw(st.booleans()) else text))
        table = ps.JsonFiles(path, cache_bytes=data.draw(st.sampled_from([1, 1 << 20])))
        assert len(table) == len(rows)
        order = data.draw(st.lists(st.integers(-len(rows), len(rows) - 1), max_size=20))
        assert table.records(order) == [rows[k] for k in order]
        again = pickle.loads(pickle.dumps(ps.JsonFiles(path)))
        assert [again[k] for k in range(len(rows))] == rows
        assert again.fingerprint == table.fingerprint


def test_columns_and_words(folder: Path) -> None:
    names = sorted(map(str, folder.iterdir()))
    table = ps.JsonFiles(names, columns=["text", "number"])
    assert list(table[50].items()) == [("text", "row 50"), ("number", 50)]
    dataset = ps.open(names, shuffle="none")
    assert dataset[N - 1] == sample(N - 1)
    said = repr(dataset)
    assert f"{N} rows: number, text, meta; " in said
    assert "part-0" in said
    assert "2 more" in said
    with pytest.raises(ConfigError, match="no column 'txt'; there are number, text, meta"):
        ps.open(names, columns=["txt"])
    for columns in ([], ["text", "text"], "text"):
        with pytest.raises(ConfigError, match="columns="):
            ps.JsonFiles(names, columns=columns)
    with pytest.raises(ConfigError, match="images= is for Arrow and Parquet"):
        ps.TableDataset(names, images="pil")
    with pytest.raises(IndexError):
        table[N]


def test_every_executor_makes_the_same_batches(folder: Path) -> None:
    names = sorted(map(str, folder.iterdir()))

    def run(executor: str) -> list[Any]:
        how = {"num_workers": 2, "executor": executor} if executor != "inline" else {"num_workers": 0}
        dataset = ps.TableDataset(names, columns=["number", "text"], seed=2)
        return [(b["number"].tolist(), b["text"]) for b in ps.DataLoader(dataset, 8, **how)]

    first, *others = [run(executor) for executor in EXECUTORS]
    assert sorted(k for batch, _ in first for k in batch) == list(range(N))
    assert all(other == first for other in others)


def test_contract(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(in_frames(lines([sample(k) for k in range(N)]), 400))

    def make(rank: int = 0, world: int = 1, **options: Any) -> Any:
        return ps.TableDataset(path, rank=rank, world_size=world, load=number, **{"seed": 2, **options})

    def loader(rank: int = 0, world: int = 1, **options: Any) -> Any:
        return ps.DataLoader(make(rank, world, **options), 4)

    check_resume(lambda: loader(mini_epochs=2), positions=range(0, 25, 4))
    check_end_of_pass(loader)
    check_elastic(loader, lambda batch: batch.tolist(), N, [(2, 2), (3, 1), (1, 3)])


def test_what_opens_as_a_manifest(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines([{"path": "a.jpg", "label": 1}]))
    assert type(ps.open(path)).__name__ == "RankDataset"
    assert type(ps.open(path, columns=["label"])).__name__ == "TableDataset"
    path.write_bytes(lines([{"path": "a.jpg", "text": "x"}]))
    assert ps.open(path)[0] == {"path": "a.jpg", "text": "x"}
    assert type(ps.open(path, label=None)).__name__ == "RankDataset"
    with pytest.raises(ManifestError, match="no such file"):
        ps.open(tmp_path / "none.jsonl")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "y"}'))
    assert ps.open(tmp_path)[0] == {"text": "y"} or ps.open(tmp_path)[0]["path"]
    with pytest.raises(ConfigError, match="open them one by one"):
        ps.open([path, tmp_path / "x.tar"])


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"[1]\n", "expected a JSON object, found list"),
        (b'{"a": 1} {"a": 2}\n', "not JSON"),
        (b'{"a": "\xff"}\n', "not UTF-8"),
        (b'{"b": 1}\n', "no key 'a'; there are b"),
        (b'{"a": "torn', "the file ends within this line: it is truncated"),
        (b"[" * 100_000 + b"\n", "not JSON"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, kind: str, line: bytes, why: str) -> None:
    ending, pack = PACKED[kind]
    path = tmp_path / f"a{ending}"
    path.write_bytes(pack(b"\n" + lines([{"a": k} for k in range(30)]) + b"\n" + line))
    table = ps.JsonFiles(path, columns=["a"])
    assert table[29] == {"a": 29}
    with pytest.raises(DataFileError, match=rf"a{ending}, line 33: .*{why}"):
        table[-1]


def test_files_that_are_no_json_lines(tmp_path: Path) -> None:
    def refused(name: str, data: bytes, why: str) -> None:
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(PenstockError, match=why):
            ps.open(path)

    refused("a.json", b'[\n{"a": 1}\n]', "a JSON array is not JSON lines")
    refused("a.json", b'{\n"a": 1\n}', "JSON over several lines")
    refused("a.json.gz", gzip.compress(b'\xef\xbb\xbf [{"a": 1}]'), "a JSON array is not JSON lines")
    endless = lines([{"a": 1}]) + b'{"a": "' + bytes([120]) * (65 << 20)
    for name, data in {"a.json": endless, "a.json.zst": zstandard.compress(endless), "b.json": endless[9:]}.items():
        refused(name, data, r"the line at byte [09] of the text does not end within 64 MiB")
    refused("b.jsonl", b"hello\n", "b.jsonl, line 1: not JSON")
    refused("c.jsonl", "x".encode("utf-16"), "UTF-16")
    refused("d.jsonl", b'{"a": 1}\0\n', "NUL at byte 8")
    refused("e.jsonl.zst", b"", "there are no rows")
    whole = zstandard.compress(lines([sample(k) for k in range(N)]))
    refused("f.jsonl.zst", whole[:-9], "truncated")
    refused("g.jsonl.zst", whole + b"rest", "no zstd frame begins at byte")
    refused("h.jsonl.gz", gzip.compress(b'{"a": 1}\n')[:-3], "truncated")
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 0xFF
    refused("i.jsonl.zst", bytes(damaged), "damaged|not JSON|not UTF-8|truncated")


def test_a_manifest_that_is_an_array(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\n[{"path": "a.jpg", "label": 1}]\n')
    with pytest.raises(ManifestError, match=r"a\.jsonl: a JSON array is not JSON lines"):
        ps.Manifest.open(path)


def test_a_changed_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(lines([sample(k) for k in range(N)]))
    table = ps.JsonFiles(path)
    with open(path, "ab") as file:
        file.write(lines([sample(N)]))
    with pytest.raises(DataFileChangedError, match="was changed"):
        table[0]
    assert len(ps.JsonFiles(path)) == N + 1


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
def test_a_file_that_is_written_again_with_its_old_time(tmp_path: Path, name: str) -> None:
    """As by ``rsync --times --inplace``: a copy of the old text is not used."""
    pack = {"jsonl": bytes, "gz": gzip.compress, "zst": zstandard.compress}[name.rpartition(".")[2]]
    path = tmp_path / name
    for number in (1, 2):
        path.write_bytes(pack(lines([{"a": number}])))
        os.utime(path, ns=(10**18, 10**18))
        assert ps.JsonFiles(path)[0] == {"a": number}
        time.sleep(0.05)


def test_an_index_that_is_damaged_or_lost_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_index, "_room_for_text", lambda: 0)
    path = tmp_path / "a.jsonl.zst"
    rows = [sample(k) for k in range(N)]
    path.write_bytes(zstandard.compress(lines(rows) * 3000))
    open_table = ps.JsonFiles(path)
    (index,) = (cache_root() / "lines").glob("*.idx")
    copy = index.with_suffix(".zst")
    sound = index.read_bytes(), copy.read_bytes()
    copy.unlink()
    assert ps.JsonFiles(path)[5] == open_table[5 - len(open_table)] == rows[5]
    for damaged in (b"", sound[0][:40], sound[0][:-8], sound[0][:16] + b"\x07" + sound[0][17:]):
        index.unlink()
        index.write_bytes(damaged)
        assert ps.JsonFiles(path)[5] == rows[5]
        assert (index.read_bytes(), copy.read_bytes()) == sound


def start(path: Path, answers: Any = None, gate: tuple[int, int] | None = None) -> Any:
    """Begin to open a file in another process, which puts the number of rows and the last of them into a queue.

    With a pipe, it begins when this process closes the end to write to.
    """
    process = multiprocessing.get_context("fork").Process(target=_open, args=(path, answers, gate), daemon=True)
    process.start()
    return process


def _open(path: Path, answers: Any, gate: tuple[int, int] | None) -> None:
    if gate is not None:
        os.close(gate[1])
        os.read(gate[0], 1)
    table = ps.JsonFiles(path)
    if answers is not None:
        answers.put((len(table), table[-1]["number"]))


@pytest.mark.parametrize("kind", ["plain", "frames", "gzip"])
def test_killed_while_indexing(tmp_path: Path, kind: str) -> None:
    """Of two processes that open a file one is killed, at a random moment: the other one completes the index."""
    ending, pack = PACKED[kind]
    path, count = tmp_path / f"a{ending}", 20_000
    text = lines([sample(k) for k in range(count)])
    path.write_bytes(in_frames(text, 10_000) if kind == "frames" else pack(text))
    answers, killed, random = multiprocessing.get_context("fork").SimpleQueue(), 0, Random(0)
    number = 0
    while number < 6 or not killed:
        assert number < 100, "it was always done before"
        # Both begin together: a fork of a large process takes longer than an index of plain text.
        gate = os.pipe()
        victim, other = start(path, gate=gate), start(path, answers, gate)
        os.close(gate[1])
        # At once for the first time: on a fast machine all is done soon. On a busy one that takes several times.
        time.sleep(random.random() * 0.01 * (number % 6))
        number += 1
        victim.kill()
        victim.join(30)
        killed += victim.exitcode == -signal.SIGKILL
        other.join(30)
        os.close(gate[0])
        assert answers.get() == (count, count - 1)
        assert ps.JsonFiles(path).records([-7, 5]) == [sample(count - 7), sample(5)]
        for left in (cache_root() / "lines").iterdir():
            left.unlink()


def test_one_process_makes_the_index_for_all(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(lines([sample(k) for k in range(20_000)])))
    answers = multiprocessing.get_context("fork").SimpleQueue()
    running = [start(path, answers) for _ in range(3)]
    for process in running:
        process.join(30)
    assert [answers.get() for _ in running] == [(20_000, 19_999)] * 3
    inodes = {entry.name: os.stat(entry).st_ino for entry in (cache_root() / "lines").iterdir()}
    assert len(inodes) == 2
    assert len(ps.JsonFiles(path)) == 20_000
    assert {entry.name: os.stat(entry).st_ino for entry in (cache_root() / "lines").iterdir()} == inodes


MANY_FILES = """
import os, resource, sys
import penstock as ps
ps.JsonFiles(sys.argv[1] + "/0.jsonl")
limit = len(os.listdir("/proc/self/fd")) + 12
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
try:
    ps.JsonFiles(sys.argv[1] + "/*.jsonl")
except ps.errors.DataFileIOError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="it sets a limit of Linux")
@pytest.mark.parametrize("is_indexed", [False, True])
def test_too_many_open_files_is_what_the_error_says(tmp_path: Path, is_indexed: bool) -> None:
    for k in range(14):
        (tmp_path / f"{k}.jsonl").write_bytes(b'{"a": 1}\n')
    if is_indexed:
        ps.JsonFiles(f"{tmp_path}/*.jsonl")
    done = subprocess.run([sys.executable, "-c", MANY_FILES, tmp_path], capture_output=True, text=True, check=True)
    assert "too many open files; raise the limit (ulimit -n)" in done.stdout


def test_memory_of_gzip_is_bounded(tmp_path: Path) -> None:
    """Some KB may hold many MB of text."""
    path, line = tmp_path / "a.jsonl.gz", b'{"a": 1}' + b" " * (1 << 20) + b"\n"
    member = gzip.compress(line * 40)
    path.write_bytes(member + gzip.compress(line) + member)
    assert path.stat().st_size < 1 << 18
    tracemalloc.start()
    try:
        assert len(ps.JsonFiles(path)) == 81
        assert tracemalloc.get_traced_memory()[1] < 30 << 20
    finally:
        tracemalloc.stop()


def test_blocks_of_compressed_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_index, "_room_for_text", lambda: 0)
    """A block shuffle decodes each frame about once, whatever the cache holds."""
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(zstandard.compress(lines([{"number": k, "text": "x" * 1000} for k in range(3000)])))
    assert line_index.LARGEST < 3000 * 1033
    dataset = ps.TableDataset(path, cache_bytes=2 << 20, shuffle="block", seed=1)
    frames = math.ceil(3000 * 1033 / line_index.FRAME)
    batches = [[row["number"] for row in dataset.__getitems__(range(k, k + 50))] for k in range(0, 3000, 50)]
    assert sorted(k for batch in batches for k in batch) == list(range(3000))
    assert frames <= dataset.table.decoded <= 3 * frames
    assert np.ptp(batches[0]) > 300


@pytest.mark.parametrize("kind", ["frames", "gzip", "zstd"])
def test_text_of_compressed_files_is_copied_while_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    suffix, pack = PACKED[kind]
    rows = [sample(k) for k in range(N)]
    path = tmp_path / f"a{suffix}"
    path.write_bytes(pack(lines(rows)))
    table = ps.JsonFiles(path)
    order = np.random.default_rng(0).permutation(N)
    assert table.records(order) == [rows[k] for k in order]
    assert (table.decoded, table.blocks()) == (0, None)
    (copy,) = (tmp_path / "cache").rglob("*.txt")
    assert copy.read_bytes() == lines(rows)
    copy.unlink()
    assert table.records(order) == [rows[k] for k in order]
    assert ps.JsonFiles(path).records(order) == [rows[k] for k in order]
    assert copy.exists()
    shutil.rmtree(tmp_path / "cache")
    monkeypatch.setattr(line_index, "_room_for_text", lambda: len(lines(rows)) - 1)
    table = ps.JsonFiles(path)
    assert table.records(order) == [rows[k] for k in order]
    assert table.decoded > 0
    assert not list((tmp_path / "cache").rglob("*.txt"))


def test_no_space_for_the_text_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "no space")
        yield

    monkeypatch.setattr(line_index, "_as_text", full)
    rows = [{"a": number} for number in range(9)]
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(lines(rows)))
    assert list(ps.JsonFiles(path)) == rows
    assert not list(cache_root().rglob("*.txt"))
