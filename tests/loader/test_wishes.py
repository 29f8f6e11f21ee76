"""Where the next run of a loader begins: each row of the table in docs/architecture.md, "Where a position lives"."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from entries_support import closed, opened
from loader_support import Range, plain
from torch.utils.data import DistributedSampler as TorchDistributedSampler

import penstock as ps

N = 12
SIZE = 3
EPOCHS = 10


def ours() -> Any:
    return ps.DistributedSampler(range(N), 1, 0, shuffle="global", seed=1)


def random() -> Any:
    return ps.RandomSampler(range(N), shuffle="global", seed=1)


def torchs() -> Any:
    return TorchDistributedSampler(Range(N), 1, 0, seed=1)


ADVANCING = [ours, random]
MAKERS = [*ADVANCING, torchs]


def loader_over(sampler: Any) -> ps.DataLoader[Any]:
    return ps.DataLoader(
        Range(N), SIZE, sampler=sampler, seed=5 if isinstance(sampler, TorchDistributedSampler) else None
    )


def rows(batches: Any) -> list[int]:
    return [row for batch in batches for row in plain(batch)]


def orders(make: Callable[[], Any]) -> list[list[int]]:
    """Return the order of each epoch, from samplers that nobody else has."""
    found = []
    for epoch in range(EPOCHS):
        sampler = make()
        sampler.set_epoch(epoch)
        found.append(list(sampler))
    assert all(before != after for before, after in pairwise(found))
    return found


def state_at(make: Callable[[], Any], epoch: int, batches: int) -> dict[str, Any]:
    loader = loader_over(make())
    loader.set_epoch(epoch)
    running = iter(loader)
    for _ in range(batches):
        next(running)
    return loader.state_dict()


class Wishes:
    """The two ways of choosing an epoch."""

    @staticmethod
    def by_loader(loader: Any, sampler: Any, epoch: int) -> None:
        loader.set_epoch(epoch)

    @staticmethod
    def by_sampler(loader: Any, sampler: Any, epoch: int) -> None:
        sampler.set_epoch(epoch)


both = pytest.mark.parametrize("choose", [Wishes.by_loader, Wishes.by_sampler])
each = pytest.mark.parametrize("make", MAKERS)


@pytest.mark.parametrize("make", ADVANCING)
def test_with_a_seed_epochs_follow_each_other(make: Callable[[], Any]) -> None:
    loader = loader_over(make())
    assert [rows(loader) for _ in range(3)] == orders(make)[:3]


@pytest.mark.parametrize("make", ADVANCING)
def test_a_run_that_was_given_up_counts_as_one(make: Callable[[], Any]) -> None:
    loader = loader_over(make())
    next(iter(loader))
    assert rows(loader) == orders(make)[1]


def test_torchs_epoch_is_repeated_until_somebody_sets_it() -> None:
    loader = loader_over(torchs())
    with pytest.warns(UserWarning, match="a second time"):
        assert [rows(loader) for _ in range(2)] == [orders(torchs)[0]] * 2


@both
@each
def test_an_epoch_is_chosen(make: Callable[[], Any], choose: Callable[..., None]) -> None:
    sampler = make()
    loader = loader_over(sampler)
    rows(loader)
    choose(loader, sampler, 7)
    assert loader.epoch == 7
    assert rows(loader) == orders(make)[7]


@each
def test_every_loader_over_a_sampler_hears_its_wish(make: Callable[[], Any]) -> None:
    sampler = make()
    loaders = [loader_over(sampler) for _ in range(2)]
    for loader in loaders:
        rows(loader)
    sampler.set_epoch(7)
    assert [rows(loader) for loader in loaders] == [orders(make)[7]] * 2


@both
@each
def test_the_epoch_of_a_loaded_state_keeps_its_place(make: Callable[[], Any], choose: Callable[..., None]) -> None:
    sampler = make()
    loader = loader_over(sampler)
    loader.load_state_dict(state_at(make, 3, 2))
    choose(loader, sampler, 3)
    assert rows(loader) == orders(make)[3][2 * SIZE :]


@both
@each
def test_another_epoch_gives_a_loaded_state_up(make: Callable[[], Any], choose: Callable[..., None]) -> None:
    sampler = make()
    loader = loader_over(sampler)
    loader.load_state_dict(state_at(make, 3, 2))
    choose(loader, sampler, 4)
    assert rows(loader) == orders(make)[4]


@pytest.mark.parametrize("make", ADVANCING)
def test_a_state_loaded_by_the_sampler_keeps_its_place_once(make: Callable[[], Any]) -> None:
    sampler = make()
    loader = loader_over(sampler)
    sampler.load_state_dict(closed(opened(state_at(make, 3, 2))["sampler"]))
    sampler.set_epoch(3)
    assert rows(loader) == orders(make)[3][2 * SIZE :]
    sampler.set_epoch(3)
    assert rows(loader) == orders(make)[3]


@pytest.mark.filterwarnings("ignore:.*does not declare itself pure")
@pytest.mark.parametrize("workers", [0, 2])
@both
@each
def test_a_run_of_which_nothing_was_had_moves(
    make: Callable[[], Any], choose: Callable[..., None], workers: int
) -> None:
    sampler = make()
    with ps.DataLoader(Range(N), SIZE, sampler=sampler, num_workers=workers, executor="thread") as loader:
        running = iter(loader)
        choose(loader, sampler, 5)
        assert rows(running) == orders(make)[5]


@both
@each
def test_the_epoch_that_runs_is_not_begun_again(make: Callable[[], Any], choose: Callable[..., None]) -> None:
    sampler = make()
    loader = loader_over(sampler)
    loader.load_state_dict(state_at(make, 3, 2))
    running = iter(loader)
    choose(loader, sampler, 3)
    assert rows(running) == orders(make)[3][2 * SIZE :]


@both
@each
def test_in_the_middle_of_a_run_an_epoch_is_for_the_next_one(
    make: Callable[[], Any], choose: Callable[..., None]
) -> None:
    sampler = make()
    loader = loader_over(sampler)
    running = iter(loader)
    had = plain(next(running))
    choose(loader, sampler, 6)
    had += plain(next(running))
    state = loader.state_dict()
    position = opened(state)["sampler"]
    assert (position["epoch"], position["consumed"]) == (0, 2 * SIZE)
    assert loader.epoch == 0
    assert had + rows(running) == orders(make)[0]
    assert loader.epoch == 6
    assert rows(loader) == orders(make)[6]


@both
@pytest.mark.parametrize("make", ADVANCING)
def test_in_the_middle_of_a_run_its_own_epoch_changes_nothing(
    make: Callable[[], Any], choose: Callable[..., None]
) -> None:
    sampler = make()
    loader = loader_over(sampler)
    running = iter(loader)
    had = plain(next(running))
    choose(loader, sampler, 0)
    assert had + rows(running) == orders(make)[0]
    assert rows(loader) == orders(make)[1]


def test_the_generator_of_a_run_that_moved_is_where_torch_leaves_it() -> None:
    generator = torch.Generator().manual_seed(1)
    loader = ps.DataLoader(Range(N), SIZE, sampler=ps.RandomSampler(range(N), generator=generator))
    running = iter(loader)
    loader.set_epoch(4)
    rows(running)
    alone = torch.Generator().manual_seed(1)
    again = ps.RandomSampler(range(N), generator=alone)
    list(again), list(again)
    assert torch.equal(generator.get_state(), alone.get_state())


@pytest.mark.parametrize("choose", [Wishes.by_loader, Wishes.by_sampler])
def test_a_mini_epoch_that_was_resumed_keeps_its_place(
    write_manifest: Callable[..., Path], choose: Callable[..., None]
) -> None:
    manifest = ps.Manifest.open(write_manifest(24))

    def made() -> tuple[Any, ps.DataLoader[Any]]:
        dataset = ps.RankDataset(manifest, rank=0, world_size=1, mini_epochs=2, seed=1)
        return dataset, ps.DataLoader(dataset, 2, collate_fn=list)

    dataset, loader = made()
    list(loader)
    running = iter(loader)
    next(running)
    state, expected = loader.state_dict(), list(running)
    dataset, loader = made()
    loader.load_state_dict(state)
    choose(loader, dataset, 0)
    running = iter(loader)
    choose(loader, dataset, 0)
    assert list(running) == expected


@each
def test_the_length_of_a_loader_is_that_of_a_whole_epoch_in_a_resumed_run(make: Callable[[], Any]) -> None:
    loader = loader_over(make())
    loader.load_state_dict(state_at(make, 3, 2))
    running = iter(loader)
    next(running)
    assert len(loader) == N // SIZE


def test_what_a_state_drew_is_for_its_own_epoch() -> None:
    def seeded() -> ps.DataLoader[Any]:
        return ps.DataLoader(Range(N), SIZE, sampler=ps.RandomSampler(range(N)), seed=5)

    asked, alone = seeded(), seeded()
    asked.state_dict()
    for loader in (asked, alone):
        loader.set_epoch(4)
    assert rows(asked) == rows(alone)


@pytest.mark.parametrize("then", [2, 5])
@both
@each
def test_a_run_that_moved_is_one_like_any_other(
    make: Callable[[], Any], choose: Callable[..., None], then: int
) -> None:
    sampler, order = make(), orders(make)
    loader = loader_over(sampler)
    running = iter(loader)
    choose(loader, sampler, 2)
    had = rows([next(running)])
    choose(loader, sampler, then)
    had += rows([next(running)])
    resumed = loader_over(make())
    resumed.load_state_dict(loader.state_dict())
    assert had + rows(resumed) == order[2]
    assert had + rows(running) == order[2]
    # The epoch that ran was fulfilled, and torch's is not gone on from.
    assert loader.epoch == (3 if then == 2 and make in ADVANCING else then)


@pytest.mark.parametrize("make", MAKERS)
def test_a_state_is_that_of_the_run_as_long_as_its_iterator_is_held(make: Callable[[], Any]) -> None:
    """Callbacks set the next epoch and then save, while the loop still has batches to come."""
    sampler, order = make(), orders(make)
    loader = loader_over(sampler)
    running = iter(loader)
    had = rows([next(running), next(running)])
    sampler.set_epoch(4)
    state = loader.state_dict()
    assert loader.epoch == 0
    resumed = loader_over(make())
    resumed.load_state_dict(state)
    assert had + rows(resumed) == order[0]
    del running
    assert loader.epoch == 4
    resumed = loader_over(make())
    resumed.load_state_dict(loader.state_dict())
    assert rows(resumed) == order[4]


@pytest.mark.parametrize("make", ADVANCING)
def test_a_state_that_a_sampler_loaded_is_used_once(make: Callable[[], Any]) -> None:
    sampler, order = make(), orders(make)
    evaluation, training = loader_over(sampler), loader_over(sampler)
    sampler.load_state_dict(closed(opened(state_at(make, 2, 3))["sampler"]))
    assert len(evaluation) == N // SIZE  # it has heard of the state, and begins later
    assert rows(training) == order[2][3 * SIZE :]
    assert rows(evaluation) == order[2]
    assert rows(loader_over(sampler)) == order[2]


@pytest.mark.parametrize("make", ADVANCING)
def test_a_run_is_where_it_is_though_another_loader_began_with_what_was_loaded(make: Callable[[], Any]) -> None:
    sampler, order = make(), orders(make)
    loader, other = loader_over(sampler), loader_over(sampler)
    running = iter(loader)
    had = rows([next(running), next(running)])
    sampler.load_state_dict(closed(opened(state_at(make, 2, 3))["sampler"]))
    assert rows(other) == order[2][3 * SIZE :]
    resumed = loader_over(make())
    resumed.load_state_dict(loader.state_dict())
    assert had + rows(resumed) == order[0]
    assert had + rows(running) == order[0]
    assert rows(loader) == order[2]


def test_a_state_that_a_data_set_loaded_is_used_once(write_manifest: Callable[..., Path]) -> None:
    manifest = ps.Manifest.open(write_manifest(N))

    def data() -> ps.RankDataset:
        return ps.RankDataset(manifest, rank=0, world_size=1, seed=3, load=row_of)

    before = ps.DataLoader(data(), SIZE)
    running = iter(before)
    had = rows([next(running)])
    dataset = data()
    dataset.load_state_dict(closed(opened(before.state_dict())["sampler"]))
    rest = rows(ps.DataLoader(dataset, SIZE))
    assert len(rest) == N - SIZE
    assert rows(ps.DataLoader(dataset, SIZE)) == had + rest


@pytest.mark.parametrize("make", MAKERS)
def test_a_sampler_shows_the_epoch_that_was_begun_or_chosen_last(make: Callable[[], Any]) -> None:
    """Programs loop from there: ``for epoch in range(sampler.epoch, epochs)``."""
    sampler = make()
    loader = loader_over(sampler)
    loader.load_state_dict(state_at(make, 3, 1))
    assert sampler.epoch == 3
    rows(loader)
    assert sampler.epoch == loader.epoch
    batches = ps.BatchSampler(sampler, SIZE, False)
    sampler.set_epoch(7)
    assert batches.epoch == 7


@pytest.mark.parametrize("make", [*MAKERS, lambda: ps.InfiniteSampler(range(N), seed=1, rank=0, world_size=1)])
@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_asking_for_the_epoch_in_a_pass_that_is_broken_off_changes_nothing(make: Callable[[], Any], epoch: int) -> None:
    found = []
    for asks in (False, True):
        sampler = make()
        loader = loader_over(sampler)
        running = iter(loader)
        next(running)
        sampler.set_epoch(epoch)
        if asks:
            assert loader.epoch == 0
        next(running)
        del running
        found.append(plain(next(iter(loader))))
    assert found[0] == found[1]


@pytest.mark.parametrize("make", MAKERS)
def test_epochs_may_be_numpys_integers(make: Callable[[], Any]) -> None:
    sampler, order = make(), orders(make)
    loader = loader_over(sampler)
    sampler.set_epoch(np.int64(4))
    assert rows(loader) == order[4]
    loader.set_epoch(np.int64(6))  # type: ignore[arg-type]
    json.dumps(loader.state_dict())
    assert rows(loader) == order[6]


@pytest.mark.parametrize("epoch", [-1, 1.5, "2", None])
def test_what_is_no_epoch_is_refused(epoch: Any) -> None:
    sampler = ours()
    for chooses in (sampler, loader_over(sampler), ps.BatchSampler(sampler, SIZE, False)):
        with pytest.raises(ValueError, match="epoch must be"):
            chooses.set_epoch(epoch)


@pytest.mark.parametrize("make", [*MAKERS, lambda: list(range(N))])
def test_a_shallow_copy_begins_where_the_loader_would(make: Callable[[], Any]) -> None:
    loader = loader_over(make())
    loader.load_state_dict(state_at(make, 0, 1))
    copied = copy.copy(loader)
    assert rows(copied) == rows(loader)
    assert copied.epoch == loader.epoch
    loader.set_epoch(3)
    assert copy.copy(loader).epoch == 3


def row_of(record: ps.Record) -> int:
    return record.row
