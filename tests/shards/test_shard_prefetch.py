"""Look-ahead over the shards of a store: hits are the part of the data that fits, whatever the shuffle."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from busy_support import HANG
from full_run import full_only
from mds_writer import write_mds
from store_server import Store

import penstock as ps
from penstock.datasets.shard_prefetch import spans
from penstock.shards.writer import ShardWriter
from penstock.storage import Cache, RemoteSource, Storage
from penstock.storage.planned_use import NEVER

SHARDS, SAMPLES, SIZE = 100, 10, 4_000


def put_shards(server: Any, folder: Path, count: int = SHARDS, *, indexed: bool = True) -> tuple[list[str], int]:
    """Store shards; their addresses, and the size of each."""
    folder.mkdir()
    with ShardWriter(str(folder / "s-%03d.tar"), maxcount=SAMPLES) as writer:
        for number in range(count * SAMPLES):
            writer.write({"__key__": f"{number:06d}", "bin": os.urandom(SIZE), "txt": str(number)})
    urls: list[str] = []
    ps.ShardSet(str(folder / "s-*.tar"))  # writes the indexes
    for path in sorted(folder.glob("s-*.tar")):
        urls.append(server.put(path.name, path.read_bytes()))
        if indexed:
            server.put(path.name + ".pidx", path.with_name(path.name + ".pidx").read_bytes())
    (size,) = {path.stat().st_size for path in folder.glob("s-*.tar")}
    return urls, size


def asked(server: Any) -> list[tuple[str, int]]:
    """What was asked for of shards: path and bytes."""
    found = []
    for path, part in server.requests:
        if path.endswith(".tar"):
            begin, _, end = part.removeprefix("bytes=").partition("-")
            found.append((path, int(end) + 1 - int(begin)))
    return found


def epoch(loader: Any) -> list[int]:
    return [int(text) for batch in loader for text in batch["txt"]]


def cache_for(urls: list[str], folder: Path, shards: float, size: int) -> Cache:
    """A cache with the indexes and room for so many shards."""
    cache = Cache(folder)
    for url in urls:
        RemoteSource(url + ".pidx", Storage(cache=cache)).local()
    return Cache(folder, max_bytes=sum(entry.size for entry in cache.entries()) + int(shards * (size + 600)))


@full_only("workers for each")
@pytest.mark.parametrize("fraction", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("shuffle", ["block", "global"])
def test_hits_are_the_part_that_fits(server: Any, tmp_path: Path, shuffle: str, fraction: float) -> None:
    urls, size = put_shards(server, tmp_path / "shards")
    cache = cache_for(urls, tmp_path / "cache", fraction * SHARDS, size)
    more = {"block_size": SAMPLES, "window": 1} if shuffle == "block" else {}
    dataset = ps.ShardDataset(urls, storage=Storage(cache=cache), decode=True, shuffle=shuffle, seed=1, **more)
    loader = ps.DataLoader(dataset, batch_size=5, num_workers=2)
    server.requests.clear()
    missed = []
    for number in range(3):
        loader.set_epoch(number)
        assert sorted(epoch(loader)) == list(range(SHARDS * SAMPLES))
        fetched = asked(server)
        server.requests.clear()
        copied = [path for path, count in fetched if count == size]
        assert len(set(copied)) == len(copied)  # none twice
        samples = len(fetched) - len(copied)
        missed.append(len(copied) * SAMPLES + samples)
        # What is read by ranges is read once, and not copied as well.
        assert sum(count for _, count in fetched) <= missed[-1] * size / SAMPLES
        assert sum(entry.size for entry in cache.entries()) <= cache.limit()
    total = SHARDS * SAMPLES
    assert total <= missed[0] <= total + 20  # a loader's first batches may be made twice, while it sizes their memory
    for count in missed[1:]:
        assert abs(1 - count / total - fraction) <= 0.03


@full_only("workers for each")
def test_shards_of_an_mds_folder(server: Any, tmp_path: Path) -> None:
    """Copies come and go in a block shuffle: what is needed last goes first, and none comes twice in an epoch."""
    samples = [{"number": number, "data": os.urandom(SIZE)} for number in range(50 * SAMPLES)]
    folder = write_mds(tmp_path / "mds", {"number": "int", "data": "bytes"}, samples, per_shard=SAMPLES)
    for path in folder.iterdir():
        url = server.put(f"mds/{path.name}", path.read_bytes())
    size = (folder / "shard.00000.mds").stat().st_size
    storage = Storage(cache=Cache(tmp_path / "cache", max_bytes=25 * (size + 600)))
    where = url.rpartition("/")[0]
    dataset = ps.MDSDataset(where, storage=storage, shuffle="block", block_size=SAMPLES, window=1)
    loader = ps.DataLoader(dataset, batch_size=5, num_workers=2)
    for number in range(3):
        loader.set_epoch(number)
        server.requests.clear()
        assert sorted(n for batch in loader for n in batch["number"].tolist()) == list(range(50 * SAMPLES))
        copied = [path for path, part in server.data_requests() if path.endswith(".mds")]
        assert len(set(copied)) == len(copied)
        # Two or three of them are in use, or come next.
        assert number == 0 or len(copied) <= 25 + 3


def test_shards_of_an_mds_folder_in_a_store_that_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their versions come with one list: each shard costs one request."""
    samples = [{"number": number, "data": os.urandom(SIZE)} for number in range(20 * SAMPLES)]
    write_mds(tmp_path / "store" / "bucket" / "mds", {"number": "int", "data": "bytes"}, samples, per_shard=SAMPLES)
    with Store(tmp_path / "store") as store:
        options = {"endpoint_url": store.url, "key": "any", "secret": "any", "region": "us-east-1"}
        storage = Storage(options=options, cache=tmp_path / "cache")
        loader = ps.DataLoader(ps.MDSDataset("s3://bucket/mds", storage=storage, shuffle="global"), batch_size=5)
        for _ in range(2):
            assert sorted(n for batch in loader for n in batch["number"].tolist()) == list(range(20 * SAMPLES))
            # The index, the list, and the shards; nothing in the second epoch.
            assert sum(store.counts()["requests"].values()) == 1 + 1 + 20
        loader.close()


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_shards_of_an_mds_folder_that_nobody_lists(server: Any, tmp_path: Path, executor: Any) -> None:
    """Their versions are looked up once, and workers know them."""
    samples = [{"number": number, "data": os.urandom(SIZE)} for number in range(20 * SAMPLES)]
    folder = write_mds(tmp_path / "mds", {"number": "int", "data": "bytes"}, samples, per_shard=SAMPLES)
    for path in folder.iterdir():
        url = server.put(f"mds/{path.name}", path.read_bytes())
    dataset = ps.MDSDataset(url.rpartition("/")[0], storage=Storage(cache=tmp_path / "cache"), shuffle="global")
    assert len(server.requests) == 1 + 20
    loader = ps.DataLoader(dataset, batch_size=5, num_workers=2, executor=executor)
    for _ in range(2):
        assert sorted(n for batch in loader for n in batch["number"].tolist()) == list(range(20 * SAMPLES))
        assert len(server.requests) == 1 + 2 * 20
    loader.close()
    again = pickle.loads(pickle.dumps(dataset))
    assert again[3]["number"] == dataset[3]["number"]
    assert len(server.requests) == 1 + 2 * 20 + 1  # the index


def _train(urls: list[str], folder: str, seed: int, found: Any) -> None:
    storage = Storage(cache=Cache(folder))
    dataset = ps.ShardDataset(urls, storage=storage, decode=True, shuffle="global", seed=seed)
    loader = ps.DataLoader(dataset, batch_size=5, num_workers=2)
    found.put([sorted(epoch(loader)) for _ in range(2)])
    loader.close()


@full_only("workers for each")
def test_jobs_share_a_cache(server: Any, tmp_path: Path) -> None:
    """Two jobs with other orders, each with workers: every shard comes once."""
    urls, _ = put_shards(server, tmp_path / "shards", 30)
    context = multiprocessing.get_context("spawn")
    found = context.Queue()
    jobs = [context.Process(target=_train, args=(urls, str(tmp_path / "cache"), seed, found)) for seed in range(2)]
    for job in jobs:
        job.start()
    for _ in jobs:
        assert found.get(timeout=HANG) == [list(range(30 * SAMPLES))] * 2
    for job in jobs:
        job.join(HANG)
        assert job.exitcode == 0
    assert sorted(path for path, count in asked(server) if count > 1) == sorted(f"/s-{n:03d}.tar" for n in range(30))
    assert Cache(tmp_path / "cache").verify()[1] == []
    assert Cache(tmp_path / "cache").planned_uses().jobs == []


@full_only("workers for each")
def test_a_job_that_is_killed(server: Any, tmp_path: Path) -> None:
    """kill -9 in the middle of an epoch: the next job goes on with what is there."""
    urls, size = put_shards(server, tmp_path / "shards", 30)
    context = multiprocessing.get_context("spawn")
    found = context.Queue()
    enough = threading.Event()

    def fault(path: str, begin: int, end: int, number: int) -> None:
        if len(asked(server)) >= 30 + 12:  # a look at each, and some of them
            enough.set()

    server.fault = fault
    cache = Cache(tmp_path / "cache")
    job = context.Process(target=_train, args=(urls, str(cache.folder), 0, found))
    job.start()
    assert enough.wait(HANG)
    job.kill()
    job.join(HANG)
    assert cache.verify()[1] == []
    assert cache.planned_uses().jobs == []
    _train(urls, str(cache.folder), 1, found)
    assert found.get(timeout=HANG) == [list(range(30 * SAMPLES))] * 2
    copies = [path for path, count in asked(server) if count == size]
    assert set(copies) == {f"/s-{number:03d}.tar" for number in range(30)}
    assert len(copies) <= 30 + 8  # what was under way came once more
    assert cache.verify()[1] == []


def test_a_second_opening_needs_no_copy(server: Any, tmp_path: Path) -> None:
    """Shards without an index in the store are indexed once, though the cache holds few of them."""
    urls, size = put_shards(server, tmp_path / "shards", 12, indexed=False)
    storage = Storage(cache=Cache(tmp_path / "cache", max_bytes=4 * (size + 600)))
    first = ps.ShardSet(list(urls), storage=storage, cache_dir=tmp_path / "indexes")
    assert sorted(asked(server)) == sorted([(f"/s-{n:03d}.tar", count) for n in range(12) for count in (1, size)])
    server.requests.clear()
    again = ps.ShardSet(list(urls), storage=storage, cache_dir=tmp_path / "indexes")
    assert [count for _, count in asked(server)] == [1] * 12
    assert again.fingerprint == first.fingerprint
    assert [sample["txt"] for sample in again.records(range(120))] == [str(n).encode() for n in range(120)]


def test_uses_of_an_epoch(tmp_path: Path) -> None:
    """First and last positions are those of the order, computed in pieces or at once."""
    with ShardWriter(str(tmp_path / "s-%d.tar"), maxcount=SAMPLES) as writer:
        for number in range(7 * SAMPLES):
            writer.write({"__key__": f"{number:06d}", "txt": str(number)})
    dataset = ps.ShardDataset(str(tmp_path / "s-*.tar"), shuffle="block", block_size=4, window=3, rank=1, world_size=3)
    view = dataset.plan.view()
    first, last, is_all = spans(view, dataset.shards.starts)
    shards = view.rows(np.arange(len(view))) // SAMPLES
    assert is_all
    for number in range(7):
        places = np.flatnonzero(shards == number)
        assert (first[number], last[number]) == (places[0], places[-1]) if len(places) else (NEVER, -1)
