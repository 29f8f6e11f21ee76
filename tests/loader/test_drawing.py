"""Generators that the sampler shares with others: they stand where torch's would at every batch."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from full_run import full_only
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, Sampler, SubsetRandomSampler, WeightedRandomSampler
from torch.utils.data import RandomSampler as TorchRandomSampler

from penstock import DataLoader, RandomSampler

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Shares(Dataset[Any]):
    """Draws from the generator that orders it."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator

    def __len__(self) -> int:
        return 302

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand((), generator=self.generator)


class Pure(Dataset[Any]):
    pure = True

    def __len__(self) -> int:
        return 1200

    def __getitem__(self, index: int) -> Any:
        return torch.full((50,), index)


class Numbers(Dataset[Any]):
    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> int:
        return index


class Lazy(Sampler[int]):
    """Draws when it is asked."""

    def __init__(self, slow: bool = False) -> None:
        self.slow = slow

    def __len__(self) -> int:
        return 1200

    def __iter__(self) -> Iterator[int]:
        for number in range(1200):
            if self.slow and number > 200:
                time.sleep(0.02)
            yield int(torch.randint(1200, ()))


def trace(kind: Any, make: Any, stop: int, **options: Any) -> list[Any]:
    """Batches, and the generator's next number at each, over two passes that are left at some batch."""
    generator = torch.Generator().manual_seed(5)
    loader = kind(make(generator), 4, generator=generator, **options)
    found: list[Any] = []
    for _ in range(2):
        for number, batch in enumerate(loader):
            found.append([part.tolist() for part in batch])
            if number == stop:
                break
        found.append(torch.rand((), generator=generator.clone_state()).item())
    return found


@pytest.mark.parametrize("stop", [0, 30, 69, 74, 75, 200])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_data_set_that_shares_the_generator(stop: int, drop_last: bool) -> None:
    ours = trace(DataLoader, Shares, stop, shuffle=True, drop_last=drop_last)
    assert ours == trace(TorchDataLoader, Shares, stop, shuffle=True, drop_last=drop_last)


@full_only("workers at every position", but=["30"])
@pytest.mark.parametrize("stop", [30, 270, 295, 1000])
def test_a_pass_that_is_left(stop: int) -> None:
    ours = trace(DataLoader, lambda _: Pure(), stop, shuffle=True, num_workers=2)
    assert ours == trace(TorchDataLoader, lambda _: Pure(), stop, shuffle=True, num_workers=2)


@pytest.mark.parametrize("stop", [0, 2, 4, 5, 30])
@pytest.mark.parametrize("ours_too", [False, True], ids=["torchs", "ours"])
def test_a_pass_over_several_permutations_that_is_left(stop: int, ours_too: bool) -> None:
    """The next permutation is drawn when it is asked for, however many batches are planned at once."""

    def run(kind: Any, sampler: Any) -> list[Any]:
        generator = torch.Generator().manual_seed(5)
        loader = kind(Numbers(), 4, sampler=sampler(Numbers(), num_samples=110, generator=generator))
        found = []
        for _ in range(2):
            for number, batch in enumerate(loader):
                found.append(batch.tolist())
                if number == stop:
                    break
        return found

    ours = run(DataLoader, RandomSampler if ours_too else TorchRandomSampler)
    assert ours == run(TorchDataLoader, TorchRandomSampler)


def test_an_epoch_that_is_chosen_after_iter_draws_alike_however_far_ahead_the_first_was_read() -> None:
    found = []
    for how in ({}, {"executor": "thread", "num_workers": 2}):
        generator = torch.Generator().manual_seed(5)
        sampler = RandomSampler(range(23), generator=generator)
        with DataLoader(Numbers(), 4, sampler=sampler, **how) as loader:
            iterator = iter(loader)
            sampler.set_epoch(1)
            order = torch.cat(list(iterator)).tolist()
        found.append((order, torch.rand((), generator=generator).item()))
    assert found[0] == found[1]


@pytest.mark.parametrize("had", [0, 2])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_resumed_process_leaves_the_global_generator_where_the_first_did(had: int, weighted: bool) -> None:
    def make() -> Any:
        sampler: Any = WeightedRandomSampler([1.0] * 23, 23) if weighted else SubsetRandomSampler(range(23))
        return DataLoader(Numbers(), 4, sampler=sampler)

    def rest(loader: Any, running: Any) -> list[Any]:
        return [batch.tolist() for batch in itertools.chain(running, loader)]

    torch.manual_seed(3)
    loader = make()
    running = iter(loader)
    for _ in range(had):
        next(running)
    state, chance = loader.state_dict(), torch.get_rng_state()
    expected = rest(loader, running)
    torch.manual_seed(4)
    again = make()
    again.load_state_dict(state)
    torch.set_rng_state(chance)
    assert rest(again, iter(again)) == expected


def test_a_sampler_that_draws_beside_the_loop() -> None:
    """How far it is read ahead shows, so it is as far as torch reads."""

    def run(kind: Any) -> list[Any]:
        torch.manual_seed(3)
        return [
            (batch[:, 0].tolist(), torch.rand(()).item()) for batch in kind(Pure(), 4, sampler=Lazy(), num_workers=2)
        ]

    assert run(DataLoader) == run(TorchDataLoader)


@full_only("as inline", but=["0"])
@pytest.mark.parametrize("workers", [0, 2])
def test_an_interrupt_while_the_sampler_is_at_work_comes_at_once(workers: int) -> None:
    had = 0
    with pytest.raises(KeyboardInterrupt):
        for _ in DataLoader(Pure(), 4, sampler=Lazy(slow=True), num_workers=workers):
            had += 1
            if had == 60:
                threading.Timer(0.03, os.kill, (os.getpid(), signal.SIGINT)).start()
    assert had <= 62


class Stubborn(Exception):
    def add_note(self, note: str) -> None:
        raise TypeError("no notes")


SAME = LookupError("always this one")


class Raises(Pure):
    def __init__(self, error: Exception) -> None:
        self.error = error

    def __getitem__(self, index: int) -> Any:
        raise self.error


def test_an_error_without_notes_is_the_users() -> None:
    with pytest.raises(Stubborn):
        next(iter(DataLoader(Raises(Stubborn()))))


def test_one_error_raised_again_collects_no_notes() -> None:
    iterator = iter(DataLoader(Raises(SAME), sampler=[7] * 5))
    for _ in range(5):
        with pytest.raises(LookupError):
            next(iterator)
    assert SAME.__notes__ == ["while loading sample 7 of Raises"]


def test_a_resume_leaves_torchs_global_generator_where_it_stands() -> None:
    def loader() -> DataLoader[Any]:
        order = TorchRandomSampler(range(20), generator=torch.default_generator)
        return DataLoader(range(20), 2, sampler=order)

    torch.manual_seed(1)
    batches = iter(first := loader())
    for _ in range(3):
        next(batches)
    state, rest = first.state_dict(), [batch.tolist() for batch in batches]
    torch.manual_seed(99)
    resumed = loader()
    resumed.load_state_dict(state)
    before = torch.get_rng_state()
    assert [batch.tolist() for batch in resumed] == rest
    assert torch.equal(torch.get_rng_state(), before)


def test_an_epoch_without_a_batch_draws_what_torch_draws() -> None:
    """The epochs of another loader after it have torch's order."""

    def orders(loader: Any) -> Any:
        torch.manual_seed(0)
        training = loader(range(6), 2, shuffle=True, collate_fn=list)
        validation = loader(range(2), 4, shuffle=True, drop_last=True)
        return [[list(training), list(validation)] for _ in range(3)]

    assert orders(DataLoader) == orders(TorchDataLoader)


def test_an_epoch_set_before_the_first_batch_draws_again() -> None:
    torch.manual_seed(0)
    loader = DataLoader(range(7), 5, shuffle=True, collate_fn=list)
    batches = iter(loader)
    loader.set_epoch(1)
    found = list(batches), torch.rand(())
    torch.manual_seed(0)
    expected: Any = TorchDataLoader(range(7), 5, shuffle=True, collate_fn=list)  # type: ignore[arg-type]
    iter(expected).__next__()
    assert found == (list(expected), torch.rand(()))


def test_a_length_leaves_the_epoch_as_it_is() -> None:
    torch.manual_seed(0)
    sampler = RandomSampler(list(range(7)))
    loader = DataLoader(range(50), 3, sampler=sampler, collate_fn=list)
    batches = iter(loader)
    sampler.replacement = True
    assert len(loader) == 3
    first, state = next(batches), loader.state_dict()
    rest = list(batches)
    assert sorted(itertools.chain(first, *rest)) == list(range(7))
    resumed = DataLoader(range(50), 3, sampler=RandomSampler(list(range(7))), collate_fn=list)
    resumed.load_state_dict(state)
    assert list(resumed) == rest


def test_a_seed_that_torchs_order_ignores_is_not_in_its_state() -> None:
    sampler = RandomSampler(range(7))
    states = [DataLoader(range(7), sampler=sampler).state_dict()]
    sampler.seed = 7
    loader = DataLoader(range(7), sampler=sampler)
    loader.load_state_dict(states[0])
    assert len(list(loader)) == 7
