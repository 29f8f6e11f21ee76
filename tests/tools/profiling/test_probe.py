"""`Probe` makes a loader's own batches by any executor, and `as_penstock_loader` turns torch's loaders into ours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterableDataset, Sampler

import penstock as ps
from penstock.tools.profiling.probe import Probe, as_penstock_loader


class Numbers(Dataset[Any]):
    pure = True
    releases_gil = True

    def __init__(self, size: int = 50) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, float(ps.generator().random())


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(10))


def last(samples: Any) -> Any:
    return samples[-1]


def made(probe: Probe, executor: str, workers: int) -> list[Any]:
    arrivals = list(probe.run(executor, workers, probe.requests))
    assert all(arrival.asked <= arrival.had for arrival in arrivals)
    return [[part.tolist() for part in arrival.result.batch] for arrival in arrivals]


def test_the_batches_are_those_of_the_loader_by_every_executor() -> None:
    loader: ps.DataLoader[Any] = ps.DataLoader(Numbers(), batch_size=8, shuffle=True, seed=4, num_workers=2)
    probe = Probe(loader, batches=100)
    results = [made(probe, *how) for how in (("inline", 0), ("auto", 2), ("process", 2), ("thread", 2))]
    assert loader.stats()["batches"] == 0
    expected = [[part.tolist() for part in batch] for batch in loader]
    assert len(expected) == 7
    assert results == [expected] * 4


def test_what_it_says_of_the_loader() -> None:
    probe = Probe(ps.DataLoader(Numbers(), batch_size=8, num_workers=3), batches=3)
    assert (probe.stream, probe.config.pure, probe.threads, probe.config.releases_gil, probe.batch_size) == (
        False,
        True,
        True,
        True,
        8,
    )
    assert len(probe.requests) == 3
    assert probe.executors() == ["auto", "process", "thread"]
    assert (probe.config.workers, probe.config.threads) == (1, 3)
    stream = Probe(ps.DataLoader(Stream(), batch_size=4), batches=3)
    assert (stream.stream, stream.requests, stream.batch_size, stream.executors()) == (True, [], 4, ["process"])
    arrivals = list(stream.run("inline", 0, []))
    assert [arrival.result.batch.tolist() for arrival in arrivals] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_few_batches_are_planned_where_they_are_large() -> None:
    loader: ps.DataLoader[Any] = ps.DataLoader(Numbers(100_000), batch_size=100)
    assert len(Probe(loader, batches=10).requests) == 10
    assert len(Probe(loader, batches=900, samples=1000).requests) == 256
    assert len(Probe(loader, batches=900, samples=50_000).requests) == 500
    assert len(Probe(loader, batches=900).requests) == 900


class Impure(Numbers):
    pure = False


def test_threads_never_seed_the_generators_that_they_share() -> None:
    probe = Probe(ps.DataLoader(Impure(), batch_size=8, seed=4), batches=3)
    assert probe.fetcher().seed_globals  # type: ignore[attr-defined]
    assert not probe.fetcher(probe.config_of("thread", 2)).seed_globals  # type: ignore[attr-defined]
    assert probe.executors() == ["process"]


@pytest.mark.parametrize("workers", [0, 2])
def test_torch_loaders_become_ours(workers: int, tmp_path: Path) -> None:
    def same(**options: Any) -> None:
        theirs: TorchDataLoader[Any] = TorchDataLoader(num_workers=workers, **options)
        ours = as_penstock_loader(theirs)
        assert (ours.num_workers, ours.batch_size, ours.drop_last) == (
            workers,
            theirs.batch_size,
            theirs.drop_last,
        ) or (ours.batch_sampler is theirs.batch_sampler)
        torch.manual_seed(0)
        expected = list(theirs)
        torch.manual_seed(0)
        assert str(list(ours)) == str(expected)

    rows = torch.arange(20).reshape(10, 2)
    same(dataset=rows, batch_size=4, drop_last=True)
    same(dataset=rows, batch_size=3, shuffle=True)
    same(dataset=rows, batch_size=3, collate_fn=last)
    same(dataset=rows, batch_size=None)
    same(dataset=rows, batch_sampler=[[1, 2], [3]])
    np.save(tmp_path / "rows.npy", rows.numpy())
    for size in (4, None):
        same(dataset=ps.ArrayDataset(tmp_path / "rows.npy"), batch_size=size)
    same(dataset=Stream(), batch_size=4, drop_last=True)
    same(dataset=Stream(), batch_size=None)


def test_ours_are_as_they_are() -> None:
    loader: ps.DataLoader[Any] = ps.DataLoader(Numbers())
    assert as_penstock_loader(loader) is loader


class Steps(Sampler[int]):
    """Goes on where it was, and says where that is."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        for _ in range(12):
            self.at += 1
            yield self.at * 5 % 12

    def __len__(self) -> int:
        return 12

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_a_sampler_with_a_state_begins_where_it_was() -> None:
    loader = ps.DataLoader(Numbers(12), 5, sampler=Steps())
    Probe(loader, batches=2)
    running = iter(loader)
    resumed = ps.DataLoader(Numbers(12), 5, sampler=Steps())
    resumed.load_state_dict(loader.state_dict())
    assert [batch[0].tolist() for batch in resumed] == [batch[0].tolist() for batch in running]


def test_the_global_generator_stays_where_it_is() -> None:
    loader = ps.DataLoader(Numbers(12), 5, sampler=ps.RandomSampler(range(12)))
    before = torch.get_rng_state()
    Probe(loader, batches=2)
    assert torch.equal(torch.get_rng_state(), before)
