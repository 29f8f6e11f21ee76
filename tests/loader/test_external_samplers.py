"""Samplers of other people: what a state of theirs must survive."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from loader_support import Range, plain
from torch.utils.data import Sampler, SubsetRandomSampler

import penstock as ps


def test_names_as_indices_go_on_behind_several_batches() -> None:
    names = list("abcdef")
    loader: ps.DataLoader[str] = ps.DataLoader({name: name for name in names}, 2, sampler=names)  # type: ignore[arg-type]
    running = iter(loader)
    next(running), next(running)
    resumed: ps.DataLoader[str] = ps.DataLoader({name: name for name in names}, 2, sampler=names)  # type: ignore[arg-type]
    resumed.load_state_dict(loader.state_dict())
    assert list(resumed) == [["e", "f"]]


def test_a_generator_assigned_after_a_state_was_asked_for_is_the_one_drawn_from() -> None:
    sampler = SubsetRandomSampler(range(12), generator=torch.Generator().manual_seed(1))
    loader = ps.DataLoader(Range(12), 12, sampler=sampler)
    loader.state_dict()
    sampler.generator = torch.Generator().manual_seed(2)
    expected = list(SubsetRandomSampler(range(12), generator=torch.Generator().manual_seed(2)))
    assert [plain(batch) for batch in loader] == [expected]


class CountsEpochs(Sampler[int]):
    """Goes on to its next epoch by itself, as it is drawn from."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(torch.randperm(12, generator=torch.Generator().manual_seed(self.epoch)).tolist())

    def __len__(self) -> int:
        return 12


class TakesEpochs(CountsEpochs):
    """The same, and takes epochs."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


@pytest.mark.filterwarnings("ignore:.*does not declare itself pure")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("make", [CountsEpochs, TakesEpochs])
def test_a_sampler_that_counts_its_epochs_is_drawn_once_an_epoch(
    make: type[CountsEpochs], seed: int | None, workers: int
) -> None:
    expected = make()
    with ps.DataLoader(Range(12), 4, sampler=make(), seed=seed, num_workers=workers, executor="thread") as loader:
        epochs, orders = [], []
        for _ in range(3):
            epochs.append(loader.epoch)
            orders.append([index for batch in loader for index in plain(batch)])
    assert orders == [list(expected) for _ in range(3)]
    if seed is not None:
        assert epochs == [0, 1, 2]


def test_the_state_is_that_of_the_run_though_the_sampler_went_on_by_itself() -> None:
    loader = ps.DataLoader(Range(12), 4, sampler=TakesEpochs(), seed=1)
    list(loader)
    running = iter(loader)
    next(running)
    resumed = ps.DataLoader(Range(12), 4, sampler=TakesEpochs(), seed=1)
    resumed.load_state_dict(loader.state_dict())
    assert resumed.epoch == 1
    assert [plain(batch) for batch in resumed] == [plain(batch) for batch in running]
