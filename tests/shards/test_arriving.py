"""Shards in a store that nobody has counted, tar and JSON lines: the order of windows, its states, what is fetched."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from busy_support import HANG
from entries_support import closed, opened, through_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from shard_support import make_tar
from store_server import Store

import penstock as ps
from penstock.errors import (
    ConfigError,
    DataFileError,
    LengthUnknownError,
    ShardError,
    StateError,
    StorageChangedError,
    StorageNotFoundError,
)
from penstock.shards import ShardSet
from penstock.shards.first_epoch import WindowOrder, window_span
from penstock.shards.shard_file import split_rows
from penstock.storage import Cache, Storage

COUNTS = [3, 0, 17, 30, 5, 5, 12, 1, 9, 30, 2, 8, 21]
TOTAL = sum(COUNTS)


def number(sample: dict[str, Any]) -> int:
    return int(sample.get("cls", sample.get("number")))


number.pure = True  # type: ignore[attr-defined]


def make_lines(numbers: Any) -> bytes:
    return b"".join(b'{"number": %d}\n' % n for n in numbers)


def pack(lines: bytes, k: int) -> bytes:
    return (lines, gzip.compress(lines), zstandard.compress(lines))[k % 3]


def put_shards(server: Any, kind: str) -> list[str]:
    """Put shards on a server, of `COUNTS` samples numbered through."""
    urls, starts = [], np.cumsum([0, *COUNTS])
    for k, (start, count) in enumerate(zip(starts[:-1].tolist(), COUNTS, strict=True)):
        lines = make_lines(range(start, start + count))
        if kind == "tar":
            data = make_tar([(f"{k:03d}_{i:04d}.cls", b"%d" % (start + i)) for i in range(count)])
        else:
            data = pack(lines, k)
        packed = "" if kind == "tar" else ("", ".gz", ".zst")[k % 3]
        urls.append(server.put(f"s-{k:03d}.{kind}{packed}", data))
    return urls


class Shards:
    """Data sets over the same shards with one cache, as the processes of a machine have it."""

    def __init__(self, urls: list[str], folder: Path) -> None:
        self.urls, self.folder = urls, folder
        self.names = [url.rpartition("/")[2] for url in urls]
        self.is_tar = urls[0].endswith(".tar")

    def storage(self) -> Storage:
        return Storage(cache=Cache(self.folder / "cache"))

    def dataset(self, rank: int = 0, world_size: int = 1, **options: Any) -> Any:
        share = {"rank": rank, "world_size": world_size, "window_shards": 4, "load": number, **options}
        if self.is_tar:
            return ps.ShardDataset(self.urls, storage=self.storage(), cache_dir=self.folder / "indexes", **share)
        return ps.TableDataset(self.urls, storage=self.storage(), **share)

    def counted(self) -> Any:
        """The same, with all shards counted before anything else."""
        if self.is_tar:
            shards = ShardSet(self.urls, storage=self.storage(), cache_dir=self.folder / "indexes")
            return ps.ShardDataset(shards, load=number)
        return ps.TableDataset(ps.JsonFiles(self.urls, storage=self.storage()), load=number)

    def loader(self, rank: int = 0, world_size: int = 1, *, options: Any = None, **loader: Any) -> ps.DataLoader[Any]:
        return ps.DataLoader(self.dataset(rank, world_size, **(options or {})), **{"batch_size": 4, **loader})


@pytest.fixture(params=["tar", "jsonl"])
def shards(server: Any, tmp_path: Path, monkeypatch: Any, request: Any) -> Shards:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))  # nobody else has indexed them
    return Shards(put_shards(server, request.param), tmp_path)


@pytest.fixture
def tars(server: Any, tmp_path: Path) -> Shards:
    return Shards(put_shards(server, "tar"), tmp_path)


def batches(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def flat(found: list[list[int]]) -> list[int]:
    return [n for batch in found for n in batch]


# The arithmetic.


@given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=20),
    world=st.integers(1, 7),
    begin=st.integers(50, 60),
    key=st.one_of(st.none(), st.integers(0, 1 << 60)),
)
def test_each_sample_of_a_window_has_one_position(counts: list[int], world: int, begin: int, key: int | None) -> None:
    shards = list(range(100, 100 + len(counts)))
    order = WindowOrder(shards, counts, begin=begin, world_size=world, key=key)
    everything = [(shard, i) for shard, count in zip(shards, counts, strict=True) for i in range(count)]
    found = []
    for rank in range(world):
        own = list(zip(*(part.tolist() for part in split_rows(order.of_rank(rank))), strict=True))
        found += own
        # A rank has every position of its stride.
        assert len(own) == len(range(begin, begin + len(order))[(rank - begin) % world :: world])
        theirs = set(shards[rank::world])
        # It reads of others what its own shards do not have.
        assert sum(shard in theirs for shard, _ in own) == min(sum(counts[rank::world]), len(own))
    assert sorted(found) == everything


@given(shards=st.integers(0, 300), world=st.integers(1, 9), most=st.integers(1, 20))
def test_windows_cover_the_shards(shards: int, world: int, most: int) -> None:
    end, widest = 0, 0
    for window in range(320):
        first, last = window_span(window, shards, most, world)
        assert first == end
        end, widest = last, max(widest, last - first)
    assert end == shards
    assert widest <= world * most
    assert window_span(0, shards, most, world)[1] <= world


def test_the_order_stays_as_it_is(shards: Shards) -> None:
    assert flat(batches(shards.loader()))[:12] == GOLDEN


GOLDEN = [79, 74, 81, 77, 73, 78, 76, 75, 80, 59, 55, 57]


# An epoch.


def test_an_epoch_without_indexes_has_every_sample_once(shards: Shards, server: Any) -> None:
    loader = shards.loader()
    assert server.data_requests() == []
    first = batches(loader)
    assert sorted(flat(first)) == list(range(TOTAL))
    assert Counter(path for path, _ in server.data_requests()) == {f"/{name}": 1 for name in shards.names}
    assert len(loader) == len(first)
    again = shards.loader()
    assert batches(again) == first
    assert len(server.data_requests()) == len(COUNTS)


def test_the_next_epoch_has_the_order_that_was_asked_for(shards: Shards) -> None:
    loader = shards.loader()
    batches(loader)
    second = batches(loader)
    other = ps.DataLoader(shards.counted(), batch_size=4)
    other.set_epoch(1)
    assert second == batches(other)


def test_ranks_share_an_epoch(shards: Shards) -> None:
    for world in (2, 3, 5):
        parts = [batches(shards.loader(rank, world)) for rank in range(world)]
        assert len({len(part) for part in parts}) == 1
        found = Counter(n for part in parts for n in flat(part))
        assert set(found) == set(range(TOTAL))
        assert sum(found.values()) == -(-TOTAL // world) * world


@pytest.mark.parametrize("remainder", ["pad", "drop", "uneven"])
def test_remainders(shards: Shards, remainder: str) -> None:
    parts = [flat(batches(shards.loader(rank, 4, options={"remainder": remainder}))) for rank in range(4)]
    sizes, found = [len(part) for part in parts], Counter(n for part in parts for n in part)
    if remainder == "uneven":
        assert sum(sizes) == TOTAL
        assert max(sizes) - min(sizes) <= 1
        assert max(found.values()) == 1
    else:
        assert set(sizes) == {TOTAL // 4 + (remainder == "pad" and TOTAL % 4 > 0)}
        assert len(found) == (TOTAL if remainder == "pad" else TOTAL // 4 * 4)


def test_shuffle_none_keeps_the_order_of_the_shards(shards: Shards) -> None:
    assert flat(batches(shards.loader(options={"shuffle": "none"}))) == list(range(TOTAL))


def test_epochs_and_seeds_differ(shards: Shards) -> None:
    orders = []
    for seed, epoch in ((0, 0), (0, 1), (1, 0)):
        loader = shards.loader(options={"seed": seed})
        loader.set_epoch(epoch)
        orders.append(flat(batches(loader)))
    assert all(sorted(order) == list(range(TOTAL)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3


@pytest.mark.parametrize(("executor", "workers"), [("process", 1), ("process", 3), ("thread", 2)])
def test_executors_make_the_same_batches(shards: Shards, executor: Any, workers: int) -> None:
    expected = batches(shards.loader())
    with shards.loader(executor=executor, num_workers=workers) as loader:
        assert batches(loader) == expected
        assert sorted(flat(batches(loader))) == list(range(TOTAL))


def test_workers_that_share_nothing_with_the_main_process(shards: Shards) -> None:
    expected = batches(shards.loader())
    with shards.loader(executor="process", num_workers=2, multiprocessing_context="spawn") as loader:
        assert batches(loader) == expected


def test_a_shard_that_is_named_twice(shards: Shards, server: Any) -> None:
    twice = Shards([*shards.urls[:2], *shards.urls[:2], shards.urls[0]], shards.folder / "twice")
    expected = sorted([*range(3)] * 3)  # the second shard is empty
    for options in ({}, {"executor": "process", "num_workers": 1}):
        with twice.loader(**options) as loader:
            assert [sorted(flat(batches(loader))) for _ in range(2)] == [expected] * 2
    assert sorted(path for path, _ in server.data_requests()) == [f"/{name}" for name in shards.names[:2]]


def test_an_empty_set_of_samples(server: Any, tmp_path: Path) -> None:
    urls = [server.put(f"e-{k}.tar", make_tar([])) for k in range(3)]
    loader = Shards(urls, tmp_path).loader()
    assert batches(loader) == []
    assert len(loader) == 0


# Lengths.


def test_a_length_is_unknown_until_all_is(shards: Shards) -> None:
    loader = shards.loader()
    for ask in (lambda: len(loader), lambda: len(loader.dataset), lambda: loader.dataset[0]):
        with pytest.raises(LengthUnknownError, match="no indexes in the store"):
            ask()
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(TypeError):
        len(loader)
    with pytest.raises(LengthUnknownError, match="no indexes in the store"):
        loader.skip(TOTAL)
    left = sum(1 for _ in iterator)
    assert len(loader) == left + 1
    assert len(loader.dataset) == TOTAL
    assert loader.dataset[0] in range(TOTAL)


@pytest.mark.parametrize("option", [{"mini_epochs": 2}, {"group": 3, "shuffle": "block"}, {"exclude": [1]}])
def test_options_that_need_counts_say_so(shards: Shards, option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="needs the number of samples"):
        shards.dataset(**option)


# States.


def test_resume_at_every_batch(shards: Shards) -> None:
    expected, states = [], []
    loader = shards.loader()
    for batch in loader:
        expected.append(batch.tolist())
        states.append(json.loads(json.dumps(loader.state_dict())))
    assert max(len(json.dumps(state)) for state in states) < 600
    for had, state in enumerate(states, 1):
        other = shards.loader()
        other.load_state_dict(state)
        assert batches(other) == expected[had:]


def test_the_epoch_behind_a_resume_is_the_same(shards: Shards) -> None:
    loader = shards.loader()
    iterator = iter(loader)
    for _ in range(5):
        next(iterator)
    state = loader.state_dict()
    rest = [batch.tolist() for batch in iterator]
    second = batches(loader)
    other = shards.loader()
    other.load_state_dict(state)
    assert batches(other) == rest
    assert batches(other) == second


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_ranks_resume_within_a_window(shards: Shards, ranks: int) -> None:
    for steps in range(1, 12):
        found, states = [], []
        for rank in range(ranks):
            loader = shards.loader(rank, ranks, batch_size=3)
            iterator = iter(loader)
            found.append([next(iterator).tolist() for _ in range(steps)])
            states.append(loader.state_dict())
        assert [state for state in states if state != states[0]] == []
        for rank in range(ranks):
            loader = shards.loader(rank, ranks, batch_size=3)
            loader.load_state_dict(states[0])
            assert found[rank] + batches(loader) == batches(shards.loader(rank, ranks, batch_size=3))


def test_a_checkpoint_holds_what_was_counted_meanwhile(shards: Shards, tmp_path: Path) -> None:
    loader = shards.loader()
    iterator = iter(loader)
    had = [next(iterator).tolist() for _ in range(9)]
    assert opened(loader.state_dict())["sampler"]["contents"]
    fresh = Shards(shards.urls, tmp_path / "other").loader()
    through_checkpoint(loader, fresh, tmp_path / "checkpoint")
    assert had + batches(fresh) == had + batches(iterator)


def test_another_number_of_ranks_is_refused_until_the_epoch_ends(shards: Shards) -> None:
    loader = shards.loader(0, 2)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    message = r"same number of ranks: 2 in the state and 3 here. Resume on 2 ranks .*set_epoch\(1\).*shards index"
    for load in (
        shards.loader(0, 3).load_state_dict,
        lambda state: shards.dataset(0, 3).load_state_dict(closed(opened(state)["sampler"])),
    ):
        with pytest.raises(StateError, match=message):
            load(state)
    for _ in iterator:
        pass
    other = shards.loader(0, 3)
    other.load_state_dict(loader.state_dict())
    assert opened(other.state_dict())["sampler"]["epoch"] == 1


def test_a_run_ends_its_epoch_as_it_began_though_indexes_are_there(tars: Shards, server: Any) -> None:
    expected = batches(tars.loader())
    loader = tars.loader()
    iterator = iter(loader)
    had = [next(iterator).tolist() for _ in range(4)]
    state = loader.state_dict()
    for url in tars.urls:
        name = url.rpartition("/")[2]
        path = tars.folder / name
        path.write_bytes(server.objects[f"/{name}"].data)
        index = ShardSet(str(path)).index(0)
        server.put(f"{name}.pidx", index.path.read_bytes())
    indexed = tars.loader()
    assert len(indexed.dataset) == TOTAL
    indexed.load_state_dict(state)
    assert had + batches(indexed) == expected
    second = batches(indexed)
    ordinary = tars.loader()
    ordinary.set_epoch(1)
    assert second == batches(ordinary) != expected


def test_a_state_behind_the_first_epoch_counts_the_shards_anew(shards: Shards, tmp_path: Path) -> None:
    loader = shards.loader()
    batches(loader)
    iterator = iter(loader)
    had = [next(iterator).tolist() for _ in range(3)]
    state = loader.state_dict()
    rest = [batch.tolist() for batch in iterator]
    elsewhere = Shards(shards.urls, tmp_path / "other").loader()
    elsewhere.load_state_dict(state)
    assert batches(elsewhere) == rest
    assert had


class TestLedger:
    def test_epochs_of_windows_are_refused_and_later_ones_answered(self, shards: Shards, tmp_path: Path) -> None:
        loader = shards.loader()
        batches(loader)
        iterator = iter(loader)
        had = [next(iterator).tolist() for _ in range(3)]
        state = json.loads(json.dumps(loader.state_dict()))
        fresh = Shards(shards.urls, tmp_path / "other").loader()  # which has counted nothing
        for ledger in (ps.Ledger(loader), ps.Ledger(fresh, state=state)):
            steps = ledger.steps_per_epoch
            assert [ledger.rows(steps + number).rows.tolist() for number in range(3)] == had
            assert ledger.step == steps + 3
            with pytest.raises(ConfigError, match="epoch 0 of the job was read in windows"):
                ledger.rows(steps - 1)
            with pytest.raises(ConfigError, match="epoch 0 of the job was read in windows"):
                ledger.seen(0, until=steps + 3)
        with pytest.raises(ConfigError, match="epoch 0 of the job was read in windows"):
            ps.Ledger(ps.DataLoader(shards.counted(), batch_size=4), state=state).rows(0)

    def test_other_loaders_remember_it(self, shards: Shards, tmp_path: Path) -> None:
        loader = shards.loader()
        batches(loader)
        next(iter(loader))
        again = Shards(shards.urls, tmp_path / "other").loader()
        again.load_state_dict(loader.state_dict())
        assert again.state_dict() == loader.state_dict()
        batches(again)
        batches(again)
        assert opened(again.state_dict())["sampler"]["windows"] == 1

    def test_a_job_that_never_read_windows_says_nothing_of_them(self, shards: Shards) -> None:
        batches(shards.loader())
        loader = ps.DataLoader(shards.counted(), batch_size=4)
        batches(loader)
        assert "windows" not in opened(loader.state_dict())["sampler"]
        assert ps.Ledger(loader).seen(0, until=ps.Ledger(loader).step) == 1

    def test_an_epoch_of_windows_in_progress(self, shards: Shards) -> None:
        loader = shards.loader()
        next(iter(loader))
        for ask in (lambda: ps.Ledger(loader), lambda: ps.Ledger(shards.loader(), state=loader.state_dict())):
            with pytest.raises(ConfigError, match="epoch 0 is read in windows"):
                ask()


def test_states_of_other_shards_are_refused(shards: Shards) -> None:
    loader = shards.loader()
    next(iter(loader))
    state = loader.state_dict()
    for other in (
        Shards(shards.urls[:-1], shards.folder).loader(),
        shards.loader(options={"window_shards": 2}),
        shards.loader(options={"shuffle": "none"}),
    ):
        with pytest.raises(StateError):
            other.load_state_dict(state)
    damaged = opened(state)
    damaged["sampler"]["window"] = [3, 10_000]
    with pytest.raises(StateError, match="damaged"):
        shards.loader().load_state_dict(closed(damaged))


def test_a_state_is_picked_up_without_the_cache(shards: Shards, tmp_path: Path, server: Any) -> None:
    expected = batches(shards.loader())
    loader = shards.loader()
    iterator = iter(loader)
    had = [next(iterator).tolist() for _ in range(25)]
    server.requests.clear()
    elsewhere = Shards(shards.urls, tmp_path / "other").loader()
    elsewhere.load_state_dict(loader.state_dict())
    assert had + batches(elsewhere) == expected
    # What came before the window is not read again.
    assert len({path for path, _ in server.data_requests()}) < len(COUNTS)


# What goes wrong.


def test_a_missing_shard_is_named_in_its_turn(shards: Shards, server: Any) -> None:
    expected = batches(shards.loader())
    gone = Shards(shards.urls, shards.folder / "gone").loader()
    del server.objects[f"/{shards.names[3]}"]
    found = []
    with pytest.raises(StorageNotFoundError, match=re.escape(shards.names[3])):
        for batch in gone:
            found.append(batch.tolist())
    assert found == expected[: len(found)]


def test_a_damaged_shard_is_named(shards: Shards, server: Any) -> None:
    server.put(shards.names[1], b"no archive at all\0" * 100)
    error = ShardError if shards.is_tar else DataFileError
    with pytest.raises(error, match=re.escape(shards.names[1])):
        batches(shards.loader())


def test_a_shard_that_is_replaced_is_an_error(shards: Shards, server: Any) -> None:
    with shards.loader(executor="process", num_workers=1) as loader:
        batches(loader)
        # What is in the cache stays what it was.
        for url in shards.urls:
            other = make_tar([("other.cls", b"99999")]) if shards.is_tar else make_lines([99999])
            server.put(url.rpartition("/")[2], other)
        assert sorted(flat(batches(loader))) == list(range(TOTAL))
    Cache(shards.folder / "cache").clear()
    with shards.loader() as fresh:
        assert sorted(flat(batches(fresh))) == [99999] * len(COUNTS)
    Cache(shards.folder / "cache").clear()
    loader = ps.DataLoader(pickle.loads(pickle.dumps(loader.dataset)), batch_size=4)
    with pytest.raises(StorageChangedError, match=r"s-0\d\d\.\S+ changed"):
        batches(loader)


@pytest.mark.parametrize("kind", ["tar", "jsonl"])
@pytest.mark.parametrize(("count", "requests"), [(3, 5), (60, 3)], ids=["one by one", "listed"])
def test_a_shard_that_is_replaced_before_it_is_read(tmp_path: Path, kind: str, count: int, requests: int) -> None:
    """The opening notes the versions of all shards."""
    urls, folder = [f"s3://data/s-{k:03d}.{kind}" for k in range(count)], tmp_path / "store" / "data"
    folder.mkdir(parents=True)

    def put(k: int, data: bytes) -> None:
        (folder / "new").write_bytes(data)
        os.replace(folder / "new", folder / f"s-{k:03d}.{kind}")

    for k in range(count):
        put(k, make_tar([(f"{k:03d}.cls", b"%d" % k)]) if kind == "tar" else make_lines([k]))
    with Store(tmp_path / "store") as store:
        access = {"endpoint_url": store.url, "key": "k", "secret": "s", "client_kwargs": {"region_name": "us-east-1"}}
        storage = Storage(access, cache=tmp_path / "cache")
        source = ps.ShardDataset if kind == "tar" else ps.TableDataset
        dataset = source(urls, storage=storage, load=number, rank=0, world_size=1)  # type: ignore[operator]
        assert sum(store.counts()["requests"].values()) <= requests
        put(1, b"")
        with (
            ps.DataLoader(dataset, batch_size=4) as loader,
            pytest.raises(StorageChangedError, match=rf"s-001\.{kind}"),
        ):
            batches(loader)


def test_a_window_whose_shard_is_replaced_is_not_resumed(shards: Shards, server: Any) -> None:
    with shards.loader() as loader:
        iterator = iter(loader)
        had = [n for _ in range(20) for n in next(iterator).tolist()]
    state, refused, starts = loader.state_dict(), list[tuple[str, str]](), np.cumsum([0, *COUNTS])
    for k, name in enumerate(shards.names):
        before = server.objects[f"/{name}"]
        server.put(name, make_tar([("other.cls", b"99999")]) if shards.is_tar else pack(make_lines([99999]), k))
        again = Shards(shards.urls, shards.folder / str(k)).loader()
        again.load_state_dict(state)
        try:
            with again:
                rest = [n for n in flat(batches(again)) if n != 99999]
        except StorageChangedError as error:
            refused.append((name, str(error)))
        else:
            others = set(range(TOTAL)) - set(range(starts[k], starts[k + 1]))
            assert Counter(n for n in had + rest if n in others) == Counter(others)
        server.objects[f"/{name}"] = before
    assert 0 < len(refused) <= 4
    assert all(f"/{name} was replaced since the state was saved" in error for name, error in refused)


def test_pickles_carry_what_is_known(shards: Shards) -> None:
    dataset = shards.dataset()
    loader = ps.DataLoader(dataset, batch_size=4)
    assert not pickle.loads(pickle.dumps(dataset)).source.complete
    batches(loader)
    other = pickle.loads(pickle.dumps(dataset))
    assert len(other) == TOTAL
    assert [other[i] for i in range(5)] == [dataset[i] for i in range(5)]


def test_nothing_is_left_running(shards: Shards) -> None:
    import threading

    loader = shards.loader()
    next(iter(loader))
    loader.close()
    batches(shards.loader())
    for thread in threading.enumerate():
        if thread.name == "penstock-fetch":  # it may be checking that the cache has the next epoch's shards
            thread.join(HANG)
            assert not thread.is_alive()
    assert os.listdir(shards.folder / "cache" / "partial") == []


@pytest.mark.parametrize("loader", [{"sampler": [0, 1, 2]}, {"batch_size": 1, "batch_sampler": [[0, 1], [2]]}])
def test_a_sampler_needs_the_number_of_samples(shards: Shards, loader: dict[str, Any]) -> None:
    dataset = shards.dataset(shuffle="none", remainder="uneven")  # else a sampler of rows is refused
    with pytest.raises(LengthUnknownError, match="read them through a DataLoader"):
        next(iter(ps.DataLoader(dataset, **loader)))
    batches(ps.DataLoader(dataset, batch_size=4))
    assert len(flat(batches(ps.DataLoader(dataset, **loader)))) == 3


@pytest.mark.parametrize("value", [0, 2.5, "4", True, None])
def test_how_many_shards_a_window_has(shards: Shards, value: Any) -> None:
    with pytest.raises(ConfigError, match="window_shards must be a positive number"):
        shards.dataset(window_shards=value)
