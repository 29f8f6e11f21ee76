"""Shards that nobody has indexed, on real ranks with caches of their own: what one has counted, the others are told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from gloo_support import die, start_ranks
from shards_support import COUNTS, number, write_shards
from store_server import Store

import penstock as ps
from penstock.errors import StorageUnavailableError
from penstock.storage import Cache, Storage


def make(url: str, place: Path, **options: Any) -> ps.DataLoader[Any]:
    storage = Storage(cache=Cache(place / "cache"))
    data = ps.ShardDataset(
        f"{url}/data/s-{{0..6}}.tar",
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


def count_without_the_other(rank: int, url: str, folder: Path) -> int:
    loader = make(url, folder / str(rank))
    if rank:
        die()
    try:
        return sum(1 for _ in loader)
    except StorageUnavailableError:
        return -1


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


def test_other_ranks_go_on(tmp_path: Path) -> None:
    write_shards(tmp_path / "store" / "data")
    with Store(tmp_path / "store") as store:
        first = start_ranks(3, stop_and_go_on, store.url, tmp_path, 2, None)
        assert all(state == first[0][1] for _, state in first)
        second = start_ranks(2, stop_and_go_on, store.url, tmp_path, 1000, first[0][1])
    assert sorted(n for had, _ in first + second for n in had) == list(range(sum(COUNTS)))
