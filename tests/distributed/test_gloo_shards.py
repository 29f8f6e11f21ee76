"""Shards that nobody has indexed, on real ranks with caches of their own: what one has counted, the others are told."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from gloo_support import start_ranks
from shards_support import COUNTS, number, write_shards
from store_server import Store

import penstock as ps
from penstock.shards import arriving
from penstock.shards.shardset import build
from penstock.shards.tar_shard import TarShard
from penstock.storage import Cache, Storage
from penstock.tools.shard_indexes import write_indexes


def make(url: str, place: Path, *, last: int = 6, **options: Any) -> ps.DataLoader[Any]:
    storage = Storage(cache=Cache(place / "cache"))
    data = ps.ShardDataset(
        f"{url}/data/s-{{0..{last}}}.tar",
        storage=storage,
        cache_dir=place / "indexes",
        load=number,
        window_shards=2,
        remainder="uneven",
    )
    return ps.DataLoader(data, batch_size=2, **options)


def read_epochs(rank: int, url: str, folder: Path, options: dict[str, Any]) -> list[list[int]]:
    loader = make(url, folder / str(rank), **options)
    return [[n for batch in loader for n in batch.tolist()] for _ in range(2)]


def read_batches(rank: int, url: str, folder: Path, count: int) -> None:
    """Read to the last batch, and not to the end, where the next epoch is looked ahead for."""
    iterator = iter(make(url, folder / str(rank)))
    for _ in range(count):
        next(iterator)


def test_ranks_share_epochs(tmp_path: Path) -> None:
    write_shards(tmp_path / "store" / "data")
    with Store(tmp_path / "store") as store:
        for options in ({}, {"executor": "process", "num_workers": 1}):
            found = start_ranks(2, read_epochs, store.url, tmp_path / str(len(options)), options)
            for parts in zip(*found, strict=True):
                assert sorted(n for part in parts for n in part) == list(range(sum(COUNTS)))
                assert abs(len(parts[0]) - len(parts[1])) <= 1


def test_what_is_counted_is_told(tmp_path: Path) -> None:
    write_shards(tmp_path / "store" / "data", [6] * 7)
    with Store(tmp_path / "store") as store:
        start_ranks(2, read_batches, store.url, tmp_path, 9)
        counts = store.counts()["objects"]
        # Shards of one size each: nobody reads what another rank has.
        whole = {name: count["bytes"] for name, count in counts.items() if name.endswith(".tar")}
        size = (tmp_path / "store" / "data" / "s-0.tar").stat().st_size
        assert all(size <= read < 1.2 * size for read in whole.values()), whole


def stop_and_go_on(rank: int, url: str, folder: Path, steps: int, state: Any) -> tuple[list[int], Any]:
    loader = make(url, folder / f"{dist.get_world_size()}-{rank}")
    if state is not None:
        loader.load_state_dict(state)
    had: list[int] = []
    for step, batch in enumerate(loader, 1):
        had += batch.tolist()
        if step == steps:
            break
    return had, loader.state_dict()


def test_as_many_ranks_go_on(tmp_path: Path) -> None:
    write_shards(tmp_path / "store" / "data")
    with Store(tmp_path / "store") as store:
        first = start_ranks(3, stop_and_go_on, store.url, tmp_path, 2, None)
        assert all(state == first[0][1] for _, state in first)
        second = start_ranks(3, stop_and_go_on, store.url, tmp_path, 1000, first[0][1])
    assert sorted(n for had, _ in first + second for n in had) == list(range(sum(COUNTS)))


def leave_early(rank: int, url: str, folder: Path) -> list[int]:
    arriving._PEER_TIMEOUT_S = 1.0
    loader = make(url, folder / str(rank), last=39)
    for step, _ in enumerate(loader, 1):
        if step == 1 + 12 * rank:
            break
    loader.set_epoch(1)
    return [n for batch in loader for n in batch.tolist()]


def test_ranks_that_left_an_epoch_early_count_what_is_left(tmp_path: Path) -> None:
    write_shards(tmp_path / "store" / "data", [4] * 40)
    with Store(tmp_path / "store") as store:
        found = start_ranks(2, leave_early, store.url, tmp_path)
    assert sorted(n for part in found for n in part) == list(range(160))


def read_with_a_small_cache(rank: int, url: str, folder: Path, size: int) -> list[int]:
    cache = Cache(folder / str(rank), max_bytes=size)
    data = ps.ShardDataset(
        f"{url}/data/s-{{0..15}}.tar",
        storage=Storage(cache=cache),
        cache_dir=folder / f"indexes-{rank}",
        load=number,
        window_shards=8,
    )
    return [n for batch in ps.DataLoader(data, batch_size=2) for n in batch.tolist()]


def test_a_cache_smaller_than_a_window(tmp_path: Path) -> None:
    write_shards(tmp_path / "store" / "data", [3] * 16)
    size = (tmp_path / "store" / "data" / "s-0.tar").stat().st_size
    with Store(tmp_path / "store") as store:
        found = start_ranks(2, read_with_a_small_cache, store.url, tmp_path, int(4.5 * size))
    assert sorted(n for part in found for n in part) == list(range(48))


def read_twice_with_other_content(rank: int, url: str, folder: Path, data: Path) -> list[list[int]]:
    found = []
    for turn in range(2):
        loader = make(url, folder / f"{turn}-{rank}")
        found.append([n for batch in loader for n in batch.tolist()])
        dist.barrier()
        if rank == 0:
            shutil.rmtree(data)
            write_shards(data, [1 + turn + k for k in range(7)])
        dist.barrier()
    return found


def test_what_was_told_of_other_content_is_not_taken(tmp_path: Path) -> None:
    data = tmp_path / "store" / "data"
    write_shards(data)
    with Store(tmp_path / "store") as store:
        found = start_ranks(2, read_twice_with_other_content, store.url, tmp_path, data)
    for parts, total in zip(zip(*found, strict=True), (sum(COUNTS), sum(range(1, 8))), strict=True):
        assert sorted(n for part in parts for n in part) == list(range(total))


def read_as_indexes_come_up(rank: int, url: str, folder: Path, data: Path, shards: list[int], first: int) -> list[int]:
    """Ranks open one after the other; in between some shards are indexed in the store."""
    for turn in (first, 1 - first):
        if rank == turn:
            loader = make(url, folder / str(rank))
        dist.barrier()
        if turn == first and rank == 0:
            handles = [TarShard(str(data / f"s-{shard}.tar"), cache_dir=str(folder / "made")) for shard in shards]
            build(handles)
            write_indexes(handles, data)
        dist.barrier()
    return [n for batch in loader for n in batch.tolist()]


@pytest.mark.parametrize("shards", [[*range(7)], [0, 2, 6], [0, 1, 2, 3, 4, 6]])
@pytest.mark.parametrize("first", [0, 1])
def test_indexes_that_come_up_as_ranks_open(tmp_path: Path, shards: list[int], first: int) -> None:
    data = tmp_path / "store" / "data"
    write_shards(data)
    with Store(tmp_path / "store") as store:
        found = start_ranks(2, read_as_indexes_come_up, store.url, tmp_path, data, shards, first)
    assert sorted(n for part in found for n in part) == list(range(sum(COUNTS)))
