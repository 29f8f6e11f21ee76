"""The loader owns the position: nobody else moves it, and its state counts samples wherever the order is known."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from busy_support import HANG
from entries_support import closed, opened
from interpreter_support import run
from loader_support import Draws, Range, plain
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import DistributedSampler as TorchDistributedSampler
from torch.utils.data import RandomSampler as TorchRandomSampler

import penstock as ps
from penstock.errors import StateError

N = 100
SIZE = 10
HAD = 4
"""Batches that training has had when somebody else comes."""


# Two loaders over one sampler.


def distributed() -> Any:
    return ps.DistributedSampler(range(N), num_replicas=1, rank=0, shuffle="global", seed=3)


def distributed_in_torchs_order() -> Any:
    return ps.DistributedSampler(range(N), num_replicas=1, rank=0, seed=3)


def unseeded() -> Any:
    return ps.RandomSampler(range(N))


def seeded() -> Any:
    return ps.RandomSampler(range(N), shuffle="global", seed=3)


def weighted() -> Any:
    return ps.WeightedRandomSampler([1.0 + row % 7 for row in range(N)], N, seed=3)


def infinite() -> Any:
    return ps.InfiniteSampler(range(N), seed=3, rank=0, world_size=1)


def grouped() -> Any:
    return ps.GroupedBatchSampler(seeded(), [row % 3 for row in range(N)], SIZE, world_size=1)


def grouped_by_class() -> Any:
    return ps.GroupedBatchSampler(seeded(), [row % 3 for row in range(N)], SIZE, order="class", world_size=1)


def token_budget() -> Any:
    lengths = [3 + row % 7 for row in range(N)]
    return ps.TokenBudgetBatchSampler(lengths, 8 * SIZE, seed=3, classes=4, world_size=1, rank=0)


def batched() -> Any:
    return ps.BatchSampler(seeded(), SIZE, drop_last=False)


def iterations() -> Any:
    return ps.IterationBasedBatchSampler(batched(), 10)


def iterations_of_groups() -> Any:
    return ps.IterationBasedBatchSampler(grouped(), 10)


SAMPLERS: dict[str, Callable[[], Any]] = {
    "distributed": distributed,
    "distributed-torch": distributed_in_torchs_order,
    "random": seeded,
    "unseeded": unseeded,
    "weighted": weighted,
    "infinite": infinite,
}
BATCH_SAMPLERS: dict[str, Callable[[], Any]] = {
    "grouped": grouped,
    "grouped-class": grouped_by_class,
    "token-budget": token_budget,
    "batch": batched,
    "iterations": iterations,
    "iterations-grouped": iterations_of_groups,
}
ALL = {**SAMPLERS, **BATCH_SAMPLERS}


def loader_over(name: str, sampler: Any) -> ps.DataLoader[Any]:
    if name in SAMPLERS:
        return ps.DataLoader(Range(N), SIZE, sampler=sampler)
    return ps.DataLoader(Range(N), batch_sampler=sampler)


def one_pass(source: Any) -> list[Any]:
    """Return the batches of a pass; of an endless one the first few."""
    return [plain(batch) for batch in itertools.islice(iter(source), N // SIZE + 3)]


def take(batches: Iterator[Any], count: int) -> list[Any]:
    return [plain(next(batches)) for _ in range(count)]


def evaluate(name: str, sampler: Any) -> None:
    one_pass(loader_over(name, sampler))


def walk(name: str, sampler: Any) -> None:
    """Go through the sampler by hand."""
    del name
    one_pass(sampler)


def begin(name: str, sampler: Any) -> None:
    """Make an iterator by hand, and take one."""
    del name
    next(iter(sampler))


OTHERS: dict[str, Callable[[str, Any], None]] = {"evaluation": evaluate, "by hand": walk, "one by hand": begin}


class Alone:
    """What a loader does whose sampler nobody else has."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(1)
        loader = loader_over(name, ALL[name]())
        running = iter(loader)
        self.had = take(running, HAD)
        self.state = loader.state_dict()
        self.rest = one_pass(running)
        self.next = one_pass(loader)


def begun(name: str, sampler: Any) -> tuple[ps.DataLoader[Any], Iterator[Any], list[Any]]:
    """Return a loader, its iterator and the batches that training has had."""
    torch.manual_seed(1)
    loader = loader_over(name, sampler)
    running = iter(loader)
    return loader, running, take(running, HAD)


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("name", ALL)
def test_a_state_is_the_loaders_whoever_else_iterates_its_sampler(name: str, other: str) -> None:
    alone, sampler = Alone(name), ALL[name]()
    train, _, had = begun(name, sampler)
    assert had == alone.had
    OTHERS[other](name, sampler)
    assert train.state_dict() == alone.state
    again = loader_over(name, ALL[name]())
    again.load_state_dict(json.loads(json.dumps(train.state_dict())))
    assert one_pass(again) == alone.rest


REPEATABLE = [name for name in ALL if name != "unseeded"]


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("name", REPEATABLE)
def test_training_goes_on_in_its_own_epoch(name: str, other: str) -> None:
    alone, sampler = Alone(name), ALL[name]()
    train, running, had = begun(name, sampler)
    assert had == alone.had
    OTHERS[other](name, sampler)
    assert one_pass(running) == alone.rest
    OTHERS[other](name, sampler)
    assert one_pass(train) == alone.next


@pytest.mark.parametrize("name", REPEATABLE)
def test_interleaved_loaders_each_have_a_state_of_their_own(name: str) -> None:
    alone, sampler = Alone(name), ALL[name]()
    first, one, had = begun(name, sampler)
    assert had == alone.had
    second, two, had = begun(name, sampler)
    assert had == alone.had
    next(one)
    assert second.state_dict() == alone.state
    again = loader_over(name, ALL[name]())
    again.load_state_dict(json.loads(json.dumps(first.state_dict())))
    later = alone.rest[1:]
    assert one_pass(again)[: len(later)] == later  # an endless pass goes on
    assert one_pass(two) == alone.rest
    assert one_pass(one)[: len(later)] == later
    assert (one_pass(first), one_pass(second)) == (alone.next, alone.next)


def test_two_loaders_over_a_data_set_each_have_all_epochs(write_manifest: Callable[..., Path]) -> None:
    manifest = ps.Manifest.open(write_manifest(N))

    def data() -> ps.RankDataset:
        return ps.RankDataset(manifest, rank=0, world_size=1, seed=3, load=row_of)

    lone = ps.DataLoader(data(), SIZE)
    expected = [one_pass(lone) for _ in range(3)]
    shared = data()
    first, second = ps.DataLoader(shared, SIZE), ps.DataLoader(shared, SIZE)
    for epoch in range(3):
        assert one_pass(first) == expected[epoch]
        assert one_pass(second) == expected[epoch]


def row_of(record: ps.Record) -> int:
    return record.row


# torch's samplers: a state counts samples.

M = 1000
TORCH: dict[str, Callable[[int], Any]] = {
    "random": lambda n: TorchRandomSampler(range(n)),
    "random, generator": lambda n: TorchRandomSampler(range(n), generator=torch.Generator().manual_seed(8)),
    "distributed": lambda n: torch_share(n, 1, 0),
}


def torch_share(n: int, ranks: int, rank: int, *, shuffle: bool = True, epoch: int = 2) -> Any:
    sampler: Any = TorchDistributedSampler(Range(n), ranks, rank, shuffle=shuffle, seed=3)
    sampler.set_epoch(epoch)
    return sampler


def had_and_state(loader: ps.DataLoader[Any], batches: int) -> tuple[list[int], Any]:
    """Return the samples of the first batches, and the state after them as it comes back from a file."""
    had = list(itertools.chain.from_iterable(take(iter(loader), batches)))
    return had, json.loads(json.dumps(loader.state_dict()))


def flat(loader: Any) -> list[int]:
    return [sample for batch in loader for sample in plain(batch)]


def passes_of(name: str) -> list[list[int]]:
    """Return the samples of two passes under torch's loader."""
    torch.manual_seed(5)
    loader: Any = TorchDataLoader(Range(M), 10, sampler=TORCH[name](M))
    return [flat(loader) for _ in range(2)]


@pytest.mark.parametrize("size", [20, 5, 7])
@pytest.mark.parametrize("name", TORCH)
def test_torchs_samplers_go_on_with_another_batch_size(name: str, size: int) -> None:
    whole, later = passes_of(name)
    torch.manual_seed(5)
    had, state = had_and_state(ps.DataLoader(Range(M), 10, sampler=TORCH[name](M)), 5)
    assert had == whole[:50]
    torch.manual_seed(6)
    again = ps.DataLoader(Range(M), size, sampler=TORCH[name](M))
    again.load_state_dict(state)
    assert flat(again) == whole[50:]
    if name != "random":  # whose next pass is drawn from the global generator
        assert flat(again) == later


@pytest.mark.parametrize("name", TORCH)
def test_torchs_samplers_go_on_over_changes_of_the_batch_size(name: str) -> None:
    whole, _ = passes_of(name)
    had: list[int] = []
    state = None
    for size in (10, 20, 5, 3):
        loader = ps.DataLoader(Range(M), size, sampler=TORCH[name](M))
        if state is None:
            torch.manual_seed(5)
        else:
            loader.load_state_dict(state)
        more, state = had_and_state(loader, 4)
        had += more
        assert had == whole[: len(had)]


@pytest.mark.parametrize("name", TORCH)
def test_a_state_over_another_length_is_refused(name: str) -> None:
    _, state = had_and_state(ps.DataLoader(Range(M), 10, sampler=TORCH[name](M)), 5)
    other = ps.DataLoader(Range(1200), 10, sampler=TORCH[name](1200))
    with pytest.raises(StateError, match=r"(?s)(1000.*1200|1200.*1000)"):
        other.load_state_dict(state)


def left_after(sampler: Callable[[int, int], Any], ranks: int) -> list[list[int]]:
    """Return what each of so many ranks has of an epoch that two began, 20 batches of 10 each."""
    states = [had_and_state(ps.DataLoader(Range(M), 10, sampler=sampler(2, rank)), 20)[1] for rank in range(2)]
    rest = []
    for rank in range(ranks):
        loader = ps.DataLoader(Range(M), 10, sampler=sampler(ranks, rank))
        loader.load_state_dict(states[0])
        rest.append(flat(loader))
    return rest


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("ranks", [1, 4, 7])
def test_torchs_distributed_sampler_is_elastic(ranks: int, shuffle: bool) -> None:
    rest = left_after(lambda count, rank: torch_share(M, count, rank, shuffle=shuffle), ranks)
    begun = [row for rank in range(2) for row in list(torch_share(M, 2, rank, shuffle=shuffle))[:200]]
    left = set(range(M)).difference(begun)
    assert len(left) == 600
    assert {len(share) for share in rest} == {-(-600 // ranks)}
    # Padding repeats samples of the beginning: where 600 go round, there is none.
    assert left <= set(itertools.chain.from_iterable(rest))

    def ours(count: int, rank: int) -> Any:
        sampler = ps.DistributedSampler(range(M), count, rank, shuffle=shuffle, seed=3)
        sampler.set_epoch(2)
        return sampler

    assert rest == left_after(ours, ranks)


# torch's samplers: their epoch, their rank, their seed.

EPOCHS = (0, 5, 7, 9)


def index_and_draws(batch: Any) -> list[tuple[int, tuple[float, ...], int]]:
    found = plain(batch)
    own = [tuple(draws) for draws in zip(*found["own"], strict=True)]
    return list(zip(found["index"], own, found["more"], strict=True))


def first_batches(loader: Any, sampler: Any) -> list[Any]:
    """Return the first batch of some epochs, which a user's loop breaks off."""
    found = []
    for epoch in EPOCHS:
        sampler.set_epoch(epoch)
        for batch in loader:
            found.append(batch)
            break
    return found


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_set_after_a_break_is_obeyed(workers: int) -> None:
    sampler: Any = TorchDistributedSampler(Range(N), 2, 1, seed=3)
    expected = first_batches(TorchDataLoader(Range(N), SIZE, sampler=sampler), sampler)
    with ps.DataLoader(Range(N), SIZE, sampler=sampler, seed=0, num_workers=workers) as loader:
        found = first_batches(loader, sampler)
    assert [plain(batch) for batch in found] == [plain(batch) for batch in expected]


def test_draws_follow_the_epoch_of_the_sampler() -> None:
    def begun_at(epoch: int) -> Any:
        sampler = torch_share(N, 2, 1, shuffle=False, epoch=epoch)
        return index_and_draws(next(iter(ps.DataLoader(Draws(N), SIZE, sampler=sampler, seed=0))))

    fresh = [begun_at(epoch) for epoch in EPOCHS]
    sampler = torch_share(N, 2, 1, shuffle=False)
    loader = ps.DataLoader(Draws(N), SIZE, sampler=sampler, seed=0)
    assert [index_and_draws(batch) for batch in first_batches(loader, sampler)] == fresh
    assert len({draws for batch in fresh for _, draws, _ in batch}) == SIZE * len(EPOCHS)


def test_whole_epochs_that_the_sampler_is_told_are_those_of_runs_that_begin_there() -> None:
    def told(epochs: tuple[int, ...]) -> list[Any]:
        sampler: Any = TorchDistributedSampler(Range(N), 2, 1, seed=3)
        loader = ps.DataLoader(Draws(N), SIZE, sampler=sampler, seed=0)
        found = []
        for epoch in epochs:
            sampler.set_epoch(epoch)
            found.append([index_and_draws(batch) for batch in loader])
        return found

    assert told(EPOCHS) == [told((epoch,))[0] for epoch in EPOCHS]


def drawn(ranks: int, rank: int, n: int = 96) -> dict[int, Any]:
    """Return what each sample of one share draws, by its index."""
    loader = ps.DataLoader(Draws(n), 8, sampler=torch_share(n, ranks, rank), seed=0)
    return {index: draws for batch in loader for index, *draws in index_and_draws(batch)}


def test_ranks_of_torchs_sampler_draw_differently() -> None:
    shares = [drawn(2, rank) for rank in range(2)]
    assert not set(shares[0]) & set(shares[1])
    assert len({tuple(draws[0]) for share in shares for draws in share.values()}) == 96


def test_peers_of_one_data_rank_draw_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = []
    for rank in range(4):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "4")
        shares.append(drawn(2, rank // 2))
    assert shares[0] == shares[1]
    assert shares[2] == shares[3]
    assert not {tuple(draws[0]) for draws in shares[0].values()} & {tuple(draws[0]) for draws in shares[2].values()}


def test_draws_do_not_depend_on_the_world_size() -> None:
    def job(ranks: int) -> dict[int, Any]:
        return {index: draws for rank in range(ranks) for index, draws in drawn(ranks, rank).items()}

    assert job(2) == job(1)
    assert job(4) == job(1)


FRESH_RUNS = """
import json, warnings
import torch
from torch.utils.data import Dataset, RandomSampler
import penstock as ps

class Draws(Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        return index, ps.generator().random()

def fresh(seed):
    torch.manual_seed(seed)
    data = Draws()
    loader = ps.DataLoader(data, 10, sampler=RandomSampler(data), seed=0)
    return [[values.tolist() for values in batch] for _ in range(2) for batch in loader]

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    runs = [fresh(1), fresh(2)]
print(json.dumps([runs, [str(w.message) for w in caught if issubclass(w.category, UserWarning)]]))
"""


def test_a_seed_gives_the_order_of_torchs_random_sampler_or_says_that_it_does_not() -> None:
    program = run(["-c", FRESH_RUNS], timeout=HANG)
    assert program.returncode == 0, program.stderr
    (first, second), caught = json.loads(program.stdout)
    said = [text for text in caught if "seed" in text and "order" in text]
    assert first == second or said


def test_batches_had_out_of_order_belong_to_their_epoch() -> None:
    """A state says which batches overtook others. Another epoch, chosen on the sampler since, is whole."""
    sampler = distributed()
    loader = ps.DataLoader(Range(N), SIZE, sampler=sampler, in_order=False)
    state = closed({**opened(loader.state_dict()), "ahead": [2, 3], "world": [0, 1]})
    loader.load_state_dict(state)
    assert len(one_pass(loader)) == N // SIZE - 2
    loader.load_state_dict(state)
    sampler.set_epoch(4)
    assert len(one_pass(loader)) == N // SIZE
