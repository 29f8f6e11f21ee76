"""Shards in a store that nobody has indexed, through the suite of every loader: by all executors, an epoch of windows
and those behind it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from full_run import full_only
from loader_conformance import (
    check_chain,
    check_close,
    check_elastic,
    check_end_of_pass,
    check_load_into_used,
    check_resume,
    record,
)
from loader_support import plain
from shards_support import COUNTS, number, write_shards
from store_server import Store

import penstock as ps
from penstock.storage import Cache, Storage

HOW: dict[str, dict[str, Any]] = {
    "inline": {},
    "thread": {"executor": "thread", "num_workers": 2},
    "process": {"executor": "process", "num_workers": 2},
    "out of order": {"executor": "thread", "num_workers": 2, "in_order": False},
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    folder = tmp_path_factory.mktemp("store")
    write_shards(folder / "data")
    with Store(folder) as store:
        yield store


class Loaders:
    """Makes loaders over the shards, each with nothing in its cache."""

    def __init__(self, store: Store, folder: Path, **options: Any) -> None:
        self.load: Any = number
        self.url, self.folder, self.options, self.made = f"{store.url}/data/s-{{0..6}}.tar", folder, options, 0

    def __call__(self, rank: int = 0, world_size: int = 1) -> ps.DataLoader[Any]:
        self.made += 1
        place = self.folder / str(self.made)
        data = ps.ShardDataset(
            self.url,
            storage=Storage(cache=Cache(place / "cache")),
            cache_dir=place / "indexes",
            load=self.load,
            window_shards=2,
            rank=rank,
            world_size=world_size,
        )
        return ps.DataLoader(data, batch_size=3, **self.options)


@full_only("a new cache for each position", but=["inline", "process"])
@pytest.mark.parametrize("how", [name for name in HOW if name != "out of order"])
def test_resume_at_every_position(store: Store, tmp_path: Path, how: str) -> None:
    check_resume(Loaders(store, tmp_path, **HOW[how]))


def test_resume_with_another_executor(store: Store, tmp_path: Path) -> None:
    check_resume(Loaders(store, tmp_path), other=Loaders(store, tmp_path / "other", **HOW["process"]), passes=2)


@pytest.mark.parametrize("how", ["inline", "thread"])
def test_the_end_of_a_pass(store: Store, tmp_path: Path, how: str) -> None:
    check_end_of_pass(Loaders(store, tmp_path, **HOW[how]))


@pytest.mark.parametrize("how", ["inline", "process"])
def test_loading_into_a_used_loader(store: Store, tmp_path: Path, how: str) -> None:
    check_load_into_used(Loaders(store, tmp_path, **HOW[how]))


@pytest.mark.parametrize("how", ["inline", "thread", "process"])
def test_close(store: Store, tmp_path: Path, how: str) -> None:
    check_close(Loaders(store, tmp_path, **HOW[how]))


def test_out_of_order_has_the_same_samples(store: Store, tmp_path: Path) -> None:
    expected, _, _ = record(Loaders(store, tmp_path)(), 2)
    found, _, _ = record(Loaders(store, tmp_path / "other", **HOW["out of order"])(), 2)
    half = len(expected) // 2
    assert sorted(found[:half]) == sorted(expected[:half])
    assert sorted(found[half:]) == sorted(expected[half:])


@full_only("a new cache for each stage")
def test_stages_of_as_many_ranks(store: Store, tmp_path: Path) -> None:
    check_elastic(Loaders(store, tmp_path), lambda batch: batch.tolist(), sum(COUNTS), [(2, 1), (2, 2), (2, 0)])


def test_states_of_resumed_runs(store: Store, tmp_path: Path) -> None:
    check_chain(Loaders(store, tmp_path), [1, 4, 2, 8])


def die_once(sample: dict[str, Any], *, marker: str) -> int:
    if sample["cls"] == b"20":
        try:
            os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            pass
        else:
            os.kill(os.getpid(), signal.SIGKILL)
    return number(sample)


def test_a_killed_worker_costs_no_sample(store: Store, tmp_path: Path) -> None:
    expected, _, _ = record(Loaders(store, tmp_path)(), 1)
    options: dict[str, Any] = {"executor": "process", "num_workers": 2, "on_worker_death": "restart"}
    make = Loaders(store, tmp_path / "other", **options)
    make.load = partial(die_once, marker=str(tmp_path / "died"))
    with make() as loader:
        assert [plain(batch) for batch in loader] == expected
    assert (tmp_path / "died").exists()
