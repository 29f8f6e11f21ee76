"""Samplers of other people: what a state of theirs must survive."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch
from loader_support import Range, plain
from torch.utils.data import Sampler, SubsetRandomSampler

import penstock as ps
from penstock.errors import StateError


class Again:
    """A sampler without a state, the same in each epoch."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n))


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


class BehindItsEnd(TakesEpochs):
    """The same, but at the end of an epoch."""

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(12, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        self.epoch += 1


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


# Accelerate's SeedableRandomSampler is such a sampler, used without a seed of the loader.
@pytest.mark.parametrize(("make", "seed"), [(TakesEpochs, 1), (BehindItsEnd, 1), (BehindItsEnd, None)])
@pytest.mark.filterwarnings("ignore:.*has no state_dict")
def test_the_state_is_that_of_the_run_though_the_sampler_went_on_by_itself(
    make: type[CountsEpochs], seed: int | None
) -> None:
    loader = ps.DataLoader(Range(12), 4, sampler=make(), seed=seed)
    list(loader)
    running = iter(loader)
    next(running)
    resumed = ps.DataLoader(Range(12), 4, sampler=make(), seed=seed)
    resumed.load_state_dict(loader.state_dict())
    assert resumed.epoch == 1
    assert [plain(batch) for batch in resumed] == [plain(batch) for batch in running]
    assert [plain(batch) for batch in resumed] == [plain(batch) for batch in loader]


class Told(Sampler[int]):
    """Shuffles by the epoch that it was told; in its own order until then."""

    def __init__(self, epoch: Any) -> None:
        self.epoch = epoch

    def set_epoch(self, epoch: Any) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self.epoch is None:
            return iter(range(12))
        return iter(torch.randperm(12, generator=torch.Generator().manual_seed(7 + int(self.epoch))).tolist())

    def __len__(self) -> int:
        return 12


@pytest.mark.parametrize("epoch", [None, -1, 0, np.int64(3), torch.tensor(2)])
def test_a_sampler_is_told_no_epoch_that_nobody_chose(epoch: Any) -> None:
    loader = ps.DataLoader(Range(12), 5, sampler=Told(epoch))
    assert [row for batch in loader for row in plain(batch)] == list(Told(epoch))


class Plain(torch.utils.data.RandomSampler):
    """Changes nothing about torch's order."""


class Reversed(torch.utils.data.RandomSampler):
    def __iter__(self) -> Iterator[int]:
        return reversed(list(super().__iter__()))


def test_a_subclass_of_torchs_that_changes_nothing_goes_on_as_torchs() -> None:
    def begun(kind: type[torch.utils.data.RandomSampler]) -> tuple[list[int], dict[str, Any], list[int]]:
        loader = ps.DataLoader(Range(12), 4, sampler=kind(range(12)))
        running = iter(loader)
        had, state = plain(next(running)), loader.state_dict()
        return had, state, [row for batch in running for row in plain(batch)]

    _, state, rest = begun(Plain)
    torch.manual_seed(99)
    resumed = ps.DataLoader(Range(12), 2, sampler=Plain(range(12)))
    resumed.load_state_dict(state)
    assert [row for batch in resumed for row in plain(batch)] == rest
    _, state, _ = begun(Reversed)
    torch.manual_seed(99)
    resumed = ps.DataLoader(Range(12), 4, sampler=Reversed(range(12)))
    resumed.load_state_dict(state)
    with pytest.warns(UserWarning, match=r"Reversed has no state_dict.*draws 4 samples again"):
        assert len([row for batch in resumed for row in plain(batch)]) == 8


class Grown(torch.utils.data.RandomSampler):
    """Over data whose number changes."""

    rows = 6

    @property  # type: ignore[override]
    def data_source(self) -> range:
        return range(self.rows)

    @data_source.setter
    def data_source(self, data_source: Any) -> None:
        pass


def test_what_a_program_assigns_to_torchs_samplers_counts() -> None:
    drawing = torch.utils.data.RandomSampler(range(12), generator=torch.Generator().manual_seed(1))
    sequential, grown = torch.utils.data.SequentialSampler(range(12)), Grown(range(12))
    loaders = [ps.DataLoader(Range(12), 4, sampler=sampler) for sampler in (drawing, sequential, grown)]
    assert [sum(len(batch) for batch in loader) for loader in loaders] == [12, 12, 6]
    drawing.data_source = sequential.data_source = range(5)
    grown.rows = 7
    assert [len(loader) for loader in loaders] == [2, 2, 2]
    assert [sum(len(batch) for batch in loader) for loader in loaders] == [5, 5, 7]
    drawing.replacement, drawing._num_samples = True, 9
    drawing.generator = torch.Generator().manual_seed(3)
    expected = torch.utils.data.RandomSampler(range(5), True, 9, torch.Generator().manual_seed(3))
    assert [row for batch in loaders[0] for row in plain(batch)] == list(expected)


@pytest.mark.parametrize("first", [None, torch.utils.data.SequentialSampler(range(12)), CountsEpochs()])
def test_what_a_program_assigns_to_the_batch_sampler_counts(first: Any) -> None:
    def loaded() -> ps.DataLoader[Any]:
        loader = ps.DataLoader(Range(12), 4, shuffle=None if first is not None else True, sampler=first)
        assert [len(batch) for batch in loader] == [4, 4, 4]
        return loader

    loader = loaded()
    inside: Any = loader.batch_sampler
    inside.batch_size, inside.drop_last = 5, True
    assert [len(batch) for batch in loader] == [5, 5]
    assert len(loader) == 2
    inside.sampler, inside.batch_size = torch.utils.data.SequentialSampler(range(6)), 3
    assert [plain(batch) for batch in loader] == [[0, 1, 2], [3, 4, 5]]
    running = iter(loader)
    next(running)
    resumed = ps.DataLoader(Range(12), 3, sampler=torch.utils.data.SequentialSampler(range(6)))
    resumed.load_state_dict(loader.state_dict())
    assert [plain(batch) for batch in resumed] == [[3, 4, 5]]


@pytest.mark.parametrize("sampler", [list(range(10)), Again(10)], ids=["list", "with a length"])
def test_all_batches_are_left_out_also_a_partial_one(sampler: Any) -> None:
    loader = ps.DataLoader(Range(10), 4, sampler=sampler)
    loader.skip(3)
    state = loader.state_dict()
    assert list(loader) == []
    assert [plain(batch) for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    resumed = ps.DataLoader(Range(10), 4, sampler=sampler)
    resumed.load_state_dict(state)
    assert list(resumed) == []


def test_an_assigned_sampler_brings_its_epoch_and_its_position() -> None:
    def assigned(change: Callable[[Any], object]) -> ps.DataLoader[Any]:
        loader = ps.DataLoader(Range(8), 4, sampler=ps.SequentialSampler(range(8)))
        sampler = ps.RandomSampler(range(8), shuffle="global", seed=1)
        change(sampler)
        cast(Any, loader.batch_sampler).sampler = sampler
        return loader

    def rows(sampler: Any) -> list[int]:
        return list(sampler)

    loader = assigned(lambda sampler: sampler.set_epoch(5))
    expected = ps.RandomSampler(range(8), shuffle="global", seed=1)
    expected.set_epoch(5)
    assert loader.epoch == 5
    assert [row for batch in loader for row in plain(batch)] == rows(expected)
    begun = ps.RandomSampler(range(8), shuffle="global", seed=1)
    running = iter(begun)
    had = [next(running) for _ in range(3)]
    loader = assigned(lambda sampler: sampler.load_state_dict(begun.state_dict()))
    assert [*had, *(row for batch in loader for row in plain(batch))] == rows(
        ps.RandomSampler(range(8), shuffle="global", seed=1)
    )


def test_a_sampler_assigned_in_mid_epoch_leaves_that_epoch() -> None:
    loader = ps.DataLoader(Range(12), 4, sampler=ps.SequentialSampler(range(12)))
    running = iter(loader)
    had = plain(next(running))
    cast(Any, loader.batch_sampler).sampler = ps.RandomSampler(range(12), shuffle="global", seed=2)
    assert len(loader) == 3
    assert [*had, *(row for batch in running for row in plain(batch))] == list(range(12))
    assert sorted(row for batch in loader for row in plain(batch)) == list(range(12))


class Longer(torch.utils.data.DistributedSampler[int]):
    """Shares of whole batches, by lengths that it assigns."""

    def __init__(self, rank: int) -> None:
        super().__init__(Range(12), 2, rank)
        self.num_samples, self.total_size = 8, 16


def test_a_share_has_the_length_that_a_subclass_gives_it() -> None:
    loader = ps.DataLoader(Range(12), 4, sampler=Longer(1))
    running = iter(loader)
    had = plain(next(running))
    assert had + [row for batch in running for row in plain(batch)] == list(Longer(1))
    running = iter(loader)
    next(running)
    resumed = ps.DataLoader(Range(12), 4, sampler=Longer(1))
    resumed.load_state_dict(loader.state_dict())
    assert [row for batch in resumed for row in plain(batch)] == list(Longer(1))[4:]


class Turned(ps.RandomSampler):
    """A subclass of ours with an order of its own."""

    def __iter__(self) -> Iterator[int]:
        return ((row + 1) % 12 for row in super().__iter__())


class TurnedBatches(ps.samplers.BatchSampler):
    def __iter__(self) -> Iterator[list[int]]:
        return (batch[::-1] for batch in super().__iter__())


def turned() -> ps.DataLoader[Any]:
    return ps.DataLoader(Range(12), 4, sampler=Turned(range(12), shuffle="global", seed=1))


def turned_batches() -> ps.DataLoader[Any]:
    sampler = ps.RandomSampler(range(12), shuffle="global", seed=1)
    return ps.DataLoader(Range(12), batch_sampler=TurnedBatches(sampler, 4, False))


@pytest.mark.parametrize("make", [turned, turned_batches])
def test_a_subclass_of_ours_is_read_by_its_own_iter(make: Callable[[], ps.DataLoader[Any]]) -> None:
    def told(epoch: int) -> ps.DataLoader[Any]:
        loader = make()
        loader.set_epoch(epoch)
        return loader

    def order(epoch: int) -> list[list[int]]:
        loader = told(epoch)
        rows = [list(rows) for rows in loader.batch_sampler]  # type: ignore[union-attr]
        return rows

    for epoch in range(3):
        assert [plain(batch) for batch in told(epoch)] == order(epoch)
        loader = told(epoch)
        running = iter(loader)
        next(running)
        resumed = make()
        resumed.load_state_dict(loader.state_dict())
        assert [plain(batch) for batch in resumed] == order(epoch)[1:]
    assert order(0) != order(1)


def test_weights_that_were_written_to_are_others_in_a_state() -> None:
    def loader_over(weights: list[float]) -> tuple[Any, ps.DataLoader[Any]]:
        sampler = torch.utils.data.WeightedRandomSampler(weights, 12)
        return sampler, ps.DataLoader(Range(12), 4, sampler=sampler)

    sampler, loader = loader_over([1.0] * 12)
    before = loader.state_dict()
    sampler.weights[:6] = 0
    with pytest.raises(StateError, match="weights is"):
        loader.load_state_dict(before)
    _, same = loader_over([0.0] * 6 + [1.0] * 6)
    same.load_state_dict(loader.state_dict())


@pytest.mark.parametrize("end", ["the iterator from before", "another loader"])
def test_a_sampler_that_went_on_by_itself_leaves_a_loaded_state_be(end: str) -> None:
    sampler = BehindItsEnd()
    batches = ps.samplers.BatchSampler(sampler, 4, False)
    loader, other = (ps.DataLoader(Range(12), batch_sampler=batches) for _ in range(2))
    before = iter(loader)
    expected = [plain(next(before)) for _ in range(2)][1:]
    with_one = ps.DataLoader(Range(12), 4, sampler=BehindItsEnd())
    running = iter(with_one)
    next(running)
    loader.load_state_dict(with_one.state_dict())
    for _ in before if end == "the iterator from before" else other:
        pass
    assert sampler.epoch == 1
    assert [plain(batch) for batch in loader][:1] == expected


class OneShare(Sampler[int]):
    """Somebody's own sampler of one rank's share."""

    def __init__(self, rank: int, samples: int = 12) -> None:
        self.rank, self.num_replicas, self.samples = rank, 2, samples

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, self.samples, 2))

    def __len__(self) -> int:
        return self.samples // 2


def test_a_state_of_one_rank_does_for_another() -> None:
    loader = ps.DataLoader(Range(12), 2, sampler=OneShare(0))
    running = iter(loader)
    next(running)
    other = ps.DataLoader(Range(12), 2, sampler=OneShare(1))
    other.load_state_dict(loader.state_dict())
    assert [row for batch in other for row in plain(batch)] == [5, 7, 9, 11]


def test_a_state_of_one_rank_counts_more_than_another_has() -> None:
    loader = ps.DataLoader(Range(12), 2, sampler=OneShare(0))
    running = iter(loader)
    next(running)
    next(running)
    other = ps.DataLoader(Range(12), 2, sampler=OneShare(1, 4))
    other.load_state_dict(loader.state_dict())
    with pytest.raises(StateError, match=r"OneShare had yielded 4 items when this state was taken.*it has only 2"):
        list(other)


def test_a_state_of_other_indices_is_refused() -> None:
    sampler = SubsetRandomSampler(range(10))
    loader = ps.DataLoader(Range(40), 4, sampler=sampler)
    state = loader.state_dict()
    sampler.indices = range(20, 30)
    with pytest.raises(StateError, match="indices is"):
        loader.load_state_dict(state)
