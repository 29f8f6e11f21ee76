"""Shards in a store under a training: objects that are replaced, requests that fail or are slow, a store that is gone.

Batches are those of the shards that were opened, or there is an error that names the object and both versions.
"""

from __future__ import annotations

import os
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from busy_support import HANG
from full_run import full_only
from store_server import Store

import penstock as ps
from penstock.errors import PenstockError, ShardChangedError, StorageChangedError
from penstock.shards.writer import ShardWriter
from penstock.storage import Cache, Storage
from penstock.storage.download import PIECE

SHARDS, SAMPLES, BATCH = 12, 8, 4
EXECUTORS: dict[str, dict[str, Any]] = {
    "inline": {"executor": "inline"},
    "thread": {"executor": "thread", "num_workers": 2},
    "process": {"executor": "process", "num_workers": 2},
}
COPY = pytest.mark.parametrize("copy", [True, False], ids=["copies", "ranges"])
EXECUTOR = pytest.mark.parametrize("executor", EXECUTORS)


def write(folder: Path, word: str, shards: int, size: int) -> list[Path]:
    """Write shards with indexes. Those of another word of this length have the same keys, sizes and offsets."""
    folder.mkdir(parents=True)
    with ShardWriter(str(folder / "s-%03d.tar"), maxcount=SAMPLES) as writer:
        for number in range(shards * SAMPLES):
            writer.write({"__key__": f"{number:06d}", "bin": word.encode() * (size // 3), "txt": f"{word} {number}"})
    ps.ShardSet(str(folder / "s-*.tar"))
    return sorted(folder.glob("s-*.tar"))


class Stored:
    """Shards in a store, and others to take their place."""

    def __init__(self, folder: Path, store: Store, shards: int = SHARDS, size: int = 3000) -> None:
        self.store = store
        self.paths = write(folder / "store" / "data", "old", shards, size)
        self.others = write(folder / "others", "new", shards, size)
        self.urls = [f"{store.url}/data/{path.name}" for path in self.paths]
        (self.size,) = {path.stat().st_size for path in self.paths}
        self.etags = set(map(self.etag, self.urls))

    def etag(self, url: str) -> str:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=HANG) as answer:
            return str(answer.headers["ETag"])

    def replace(self) -> None:
        for path, other in zip(self.paths, self.others, strict=True):
            os.replace(other, path)

    def cache(self, folder: Path, shards: float) -> Cache:
        """A cache with the indexes, and room for so many shards."""
        cache = Cache(folder)
        ps.ShardSet(list(self.urls), storage=Storage(cache=cache))
        return Cache(folder, max_bytes=sum(e.size for e in cache.entries()) + int(shards * (self.size + 600)))

    def loader(self, storage: Storage, copy: bool, executor: str) -> ps.DataLoader:
        dataset = ps.ShardDataset(
            self.urls, storage=storage, copy=copy, decode=True, shuffle="block", block_size=SAMPLES, window=2, seed=5
        )
        return ps.DataLoader(dataset, batch_size=BATCH, **EXECUTORS[executor])

    def check(self, error: BaseException) -> None:
        """See that an error names an object, and the version that it was and is."""
        text = str(error)
        url = next(url for url in self.urls if url in text)
        assert any(etag in text for etag in self.etags), text
        assert self.etag(url) in text


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "store") as made:
        yield made


def rest(batches: Any, had: list[str]) -> BaseException | None:
    """Read on; what was had is added, and the error that ended it returned."""
    try:
        for batch in batches:
            had += batch["txt"]
    except PenstockError as error:
        return error
    return None


def all_old(had: list[str]) -> bool:
    return len(set(had)) == len(had) and all(text.startswith("old ") for text in had)


# -------------------------------------------------------------------------------------- objects that are replaced


@full_only("workers for each", but=["inline-ranges", "process-copies"])
@COPY
@EXECUTOR
def test_replaced_in_the_middle_of_an_epoch(store: Store, tmp_path: Path, executor: str, copy: bool) -> None:
    stored = Stored(tmp_path, store)
    storage = Storage(cache=stored.cache(tmp_path / "cache", 2.5))
    with stored.loader(storage, copy, executor) as loader:
        batches = iter(loader)
        had = list(next(batches)["txt"])
        stored.replace()
        error = rest(batches, had)
    assert isinstance(error, StorageChangedError | ShardChangedError), repr(error)
    stored.check(error)
    assert all_old(had)


@full_only("workers for each", but=["inline-copies", "process-ranges"])
@COPY
@EXECUTOR
def test_replaced_between_two_epochs(store: Store, tmp_path: Path, executor: str, copy: bool) -> None:
    """With copies: most of them were evicted by the end of the epoch."""
    stored = Stored(tmp_path, store)
    storage = Storage(cache=stored.cache(tmp_path / "cache", 2.5))
    with stored.loader(storage, copy, executor) as loader:
        first: list[str] = []
        assert rest(loader, first) is None
        assert len(first) == SHARDS * SAMPLES
        stored.replace()
        had: list[str] = []
        error = rest(loader, had)
    assert isinstance(error, StorageChangedError | ShardChangedError), repr(error)
    stored.check(error)
    assert all_old(first)
    assert all_old(had)


@full_only("workers for each", but=["inline"])
@EXECUTOR
def test_replaced_in_the_middle_of_a_copy(store: Store, tmp_path: Path, executor: str) -> None:
    """Behind the first of three blocks of one shard: nothing of either version is put together with the other."""
    stored = Stored(tmp_path, store, shards=3, size=(PIECE * 5 // 2) // SAMPLES)
    storage = Storage(cache=Cache(tmp_path / "cache"), parallel=1)
    with stored.loader(storage, True, executor) as loader:
        store.reset()
        store.behave(replace={"data/s-001.tar": (2, str(stored.others[1]))})
        had: list[str] = []
        error = rest(loader, had)
    assert isinstance(error, StorageChangedError | ShardChangedError), repr(error)
    stored.check(error)
    assert all_old(had)
    assert Cache(tmp_path / "cache").verify()[1] == []
    # The index beside it is of the old one still.
    with stored.loader(storage, True, executor) as loader:
        stale = rest(loader, had)
    assert isinstance(stale, ShardChangedError), repr(stale)
    assert stored.urls[1] in str(stale)
    assert "penstock shards index" in str(stale)
    assert all(text.startswith("old ") for text in had)
    # Who opens both reads the new one, and nothing of what was left of the old one.
    index = stored.others[1].name + ".pidx"
    os.replace(stored.others[1].with_name(index), stored.paths[1].with_name(index))
    with stored.loader(storage, True, executor) as loader:
        again: list[str] = []
        assert rest(loader, again) is None
    assert sorted(text for text in again if text.startswith("new")) == sorted(f"new {n}" for n in range(8, 16))
    assert len(set(again)) == 3 * SAMPLES


@full_only("workers for each", but=["inline"])
@EXECUTOR
def test_a_copy_outlives_its_object(store: Store, tmp_path: Path, executor: str) -> None:
    """What is in the cache is of the version that was opened, whatever became of the object."""
    stored = Stored(tmp_path, store)
    with stored.loader(Storage(cache=Cache(tmp_path / "cache")), True, executor) as loader:
        first: list[str] = []
        assert rest(loader, first) is None
        stored.replace()
        had: list[str] = []
        assert rest(loader, had) is None
    assert all_old(first)
    assert all_old(had)
    assert sorted(had) == sorted(first)


# ------------------------------------------------------------------------------------- stores that fail or are slow

FAULTS: dict[str, dict[str, Any]] = {
    "fails": {"unavailable": 0.05, "cut": 0.05, "seed": 1},
    "slow": {"slow": 0.05, "slow_seconds": 0.3, "seed": 1},
    "gone": {"outage": 1.0, "outage_after": 15},
}


@full_only("workers for each", but=["inline-ranges-fails", "process-copies-fails", "process-copies-gone"])
@pytest.mark.parametrize("fault", FAULTS)
@COPY
@EXECUTOR
def test_the_batches_stay_the_same(store: Store, tmp_path: Path, executor: str, copy: bool, fault: str) -> None:
    stored = Stored(tmp_path, store, shards=24)

    def batches(name: str) -> list[list[str]]:
        storage = Storage(cache=stored.cache(tmp_path / name, 8))
        with stored.loader(storage, copy, executor) as loader:
            store.reset()
            store.behave(**behaviour)
            return [batch["txt"] for _ in range(2) for batch in loader]

    behaviour: dict[str, Any] = {}
    expected = batches("whole")
    assert len(expected) == 2 * 24 * SAMPLES / BATCH
    behaviour = FAULTS[fault]
    assert batches("faulty") == expected
    assert sum(store.counts()["faults"].values()) > 0


@full_only("waits for seconds")
def test_a_store_that_is_gone_for_longer(store: Store, tmp_path: Path) -> None:
    """For longer than a few attempts with growing pauses take."""
    stored = Stored(tmp_path, store)
    storage = Storage(cache=Cache(tmp_path / "cache"))
    with stored.loader(storage, True, "process") as loader:
        store.reset()
        store.behave(outage=12.0, outage_after=3)
        had: list[str] = []
        assert rest(loader, had) is None
    assert all_old(had)
    assert len(had) == SHARDS * SAMPLES
    assert store.counts()["faults"]["outage"] > 0


@pytest.mark.parametrize("fault", ["fails", "gone"])
def test_opening_outlasts_faults(store: Store, tmp_path: Path, fault: str) -> None:
    stored = Stored(tmp_path, store)
    store.reset()
    store.behave(**FAULTS[fault])
    shards = ps.ShardSet(list(stored.urls), storage=Storage(cache=Cache(tmp_path / "cache")))
    assert [sample["txt"] for sample in shards] == [f"old {n}".encode() for n in range(SHARDS * SAMPLES)]
    assert re.search("unavailable|cut|outage", str(store.counts()["faults"]))
