"""Samplers that are not ours: a resume gives the rest of the epoch, whatever was drawn ahead."""

from __future__ import annotations

import itertools
import json
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from full_run import examples, full_only
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter_support import FULL
from state_support import IteratorSampler, ShufflingSampler, StatefulBatches, StatefulSampler, as_they_are
from torch.utils.data import BatchSampler as TorchBatchSampler
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import penstock as ps
from penstock.errors import StateError
from penstock.plan.reader import PlanReader
from penstock.samplers.batch import batch_plan_of

N = 23
SIZE = 4


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(4)


def torchs(items: Any = range(N), rank: int = 0) -> Any:
    return DistributedSampler(items, 2, rank, seed=3)


def batched(sampler: Any, size: int = SIZE, drop_last: bool = False) -> ps.BatchSampler:
    return ps.BatchSampler(sampler, size, drop_last)


class Seeded:
    """No state and no epochs; shuffles the same way at each ``iter()``."""

    def __init__(self, items: Sequence[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Any]:
        return iter(random.Random(8).sample(self.items, len(self.items)))


class Told(Seeded):
    """Its order follows from the epoch that it was told, which it does not say."""

    def __init__(self, items: Sequence[Any]) -> None:
        super().__init__(items)
        self.now = 0

    def set_epoch(self, epoch: int) -> None:
        self.now = epoch

    def __iter__(self) -> Iterator[Any]:
        return iter(random.Random(self.now).sample(self.items, len(self.items)))


class Saying(Told):
    """It says its epoch too, as torch's DistributedSampler and copies of it do."""

    @property
    def epoch(self) -> int:
        return self.now


class LargeState(StatefulSampler):
    """Its state is so large that it is not taken after each batch."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "buffer": "x" * (1 << 18)}


class IteratorBatches:
    """A batch sampler whose iterator has the state."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[Any]:
        return _Pairs(self.n)


class _Pairs(Iterator[list[int]]):
    def __init__(self, n: int) -> None:
        self.n = n
        self.place = 0

    def __next__(self) -> list[int]:
        if self.place >= self.n:
            raise StopIteration
        self.place += 1
        return [self.place, 2 * self.place]

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


NAMES = [f"n{index}" for index in range(N)]
PAIRS = [(index, f"n{index}") for index in range(N)]

REPEATING: dict[str, Callable[[], Any]] = {
    "list of lists": lambda: [[3, 1], [4], [1, 5, 9], [2, 6]],
    "list of lists of strings": lambda: [["a", "b"], ["c"], ["d", "e", "f"], ["g"]],
    "list": lambda: batched(list(range(N))),
    "range": lambda: batched(range(N)),
    "seeded": lambda: batched(Seeded(range(N))),
    "seeded, dropping": lambda: batched(Seeded(range(N)), drop_last=True),
    "strings": lambda: batched(Seeded(NAMES)),
    "tuples": lambda: batched(Seeded(PAIRS)),
    "mixed": lambda: batched(Seeded([*range(9), *NAMES[9:]])),
    "told": lambda: batched(Told(range(N))),
    "saying": lambda: batched(Saying(range(N))),
}
"""Samplers without a state whose order repeats."""

STATEFUL: dict[str, Callable[[], Any]] = {
    "stateful": lambda: batched(StatefulSampler(N)),
    "stateful, torch's": lambda: TorchBatchSampler(StatefulSampler(N), SIZE, False),
    "stateful, large": lambda: batched(LargeState(N)),
    "iterator": lambda: batched(IteratorSampler(N), drop_last=True),
    "iterator, short": lambda: batched(IteratorSampler(3)),
    "batches": lambda: StatefulBatches(N),
    "iterator of batches": lambda: IteratorBatches(7),
}
"""Samplers with a state of their own."""

TORCH: dict[str, Callable[[], Any]] = {
    "sequential": lambda: batched(SequentialSampler(range(N))),
    "random, generator": lambda: batched(RandomSampler(range(N), generator=generator())),
    "replacement, generator": lambda: batched(
        RandomSampler(range(N), replacement=True, num_samples=150, generator=generator())
    ),
    "subset, generator": lambda: batched(SubsetRandomSampler(range(5, N), generator=generator())),
    "weighted, generator": lambda: batched(WeightedRandomSampler([1.0] * N, N, generator=generator())),
    "distributed": lambda: batched(torchs(rank=1)),
}
"""torch's, all epochs of which follow from what they were given."""

DRAWN: dict[str, Callable[[], Any]] = {
    "random": lambda: batched(RandomSampler(range(N))),
    "random, dropping": lambda: TorchBatchSampler(RandomSampler(range(N)), SIZE, True),
    "replacement": lambda: batched(RandomSampler(range(N), replacement=True, num_samples=50)),
    "subset": lambda: batched(SubsetRandomSampler(range(5, N))),
    "weighted": lambda: batched(WeightedRandomSampler([1.0] * N, N)),
}
"""torch's, which begin each epoch with a draw from the global generator."""

KINDS = REPEATING | STATEFUL | TORCH | DRAWN
STEADY = REPEATING | STATEFUL | TORCH


def reseed(seed: int = 0) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def stands() -> Any:
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]


def reader_of(sampler: Any) -> PlanReader[Any]:
    return PlanReader(batch_plan_of(sampler))


def loaded(sampler: Any, state: Any) -> PlanReader[Any]:
    """Return a reader that goes on from a state, which came from a file."""
    reader = reader_of(sampler)
    reader.choose(reader.plan.read(json.loads(json.dumps(state))), loaded=True)
    return reader


def had(run: Iterable[Any]) -> list[Any]:
    return [batch for batch, _ in run]


def walk(reader: PlanReader[Any], epochs: int, ahead: int) -> tuple[list[Any], list[Any]]:
    """Return the batches; and before and after each, its number, the epoch and the state. Others are drawn ahead."""
    seen: list[Any] = []
    states = [(0, 0, reader.cursor(0).state())]
    for epoch in range(epochs):
        run = reader.start(advance=False)
        drawn: list[Any] = []
        batches = iter(run)
        for count in itertools.count(1):
            drawn += itertools.islice(batches, ahead + count - len(drawn))
            if count > len(drawn):
                break
            seen.append(drawn[count - 1][0])
            states.append((len(seen), epoch, run.cursor(count).state()))
        reader.finish(advance=False)
        states.append((len(seen), epoch + 1, reader.cursor(0).state()))
    return seen, states


def check(make: Callable[[], Any], epochs: int, ahead: int) -> None:
    """Resume from every state of a run, in a process whose generators stand elsewhere."""
    reseed()
    seen, states = walk(reader_of(make()), epochs, ahead)
    whole = len(seen) // epochs
    for count, epoch, state in states:
        reseed(99)
        reader = loaded(make(), state)
        assert reader.cursor(0).state() == state
        before = stands()
        rest = had(reader.start(advance=False))
        if epoch < epochs:
            assert rest == seen[count : whole * (epoch + 1)], f"after {count}"
            assert stands() == before


# Resumes.


@pytest.mark.parametrize("ahead", [0, 3, 200] if FULL else [3])
@pytest.mark.parametrize("name", KINDS)
def test_an_epoch_goes_on_behind_every_batch(name: str, ahead: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("default", "(Seeded|Told|Saying) has no state_dict")
        check(KINDS[name], 1, ahead)


@pytest.mark.parametrize("ahead", [0, 2, 200] if FULL else [2])
@pytest.mark.parametrize("name", KINDS)
def test_later_epochs_go_on(name: str, ahead: int) -> None:
    check(KINDS[name], 3, ahead)


@pytest.mark.parametrize("count", [0, 1, 2, "all"])
@pytest.mark.parametrize("name", STEADY)
def test_the_next_epoch_is_that_of_the_uninterrupted_run(name: str, count: int | str) -> None:
    reader = reader_of(STEADY[name]())
    expected = [had(reader.start(advance=False)) for _ in range(4)]
    count = min(len(expected[0]), count) if isinstance(count, int) else len(expected[0])
    first = reader_of(STEADY[name]()).start(advance=False)
    begun = had(itertools.islice(first, count))
    again = loaded(STEADY[name](), first.cursor(count).state())
    got = [begun + had(again.start(advance=False)), *(had(again.start(advance=False)) for _ in range(3))]
    assert got == expected


@given(
    name=st.sampled_from(list(STEADY)),
    stops=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    ahead=st.integers(0, 4),
)
@settings(max_examples=examples(20, 80))
def test_chains_of_resumes(name: str, stops: list[int], ahead: int) -> None:
    whole = had(reader_of(STEADY[name]()).start(advance=False))
    state, count = None, 0
    for stop in stops:
        reader = reader_of(STEADY[name]()) if state is None else loaded(STEADY[name](), state)
        run = reader.start(advance=False)
        got = had(itertools.islice(run, stop + ahead))[:stop]
        assert got == whole[count : count + stop]
        count += len(got)
        state = run.cursor(len(got)).state()


INDICES: dict[str, Callable[[], Any]] = {
    "list": lambda: list(range(N)),
    "seeded": lambda: Seeded(range(N)),
    "strings": lambda: Seeded(NAMES),
    "tuples": lambda: Seeded(PAIRS),
    "stateful": lambda: StatefulSampler(N),
    "stateful, large": lambda: LargeState(N),
    "iterator": lambda: IteratorSampler(N),
    "distributed": lambda: torchs(rank=1),
    "random": lambda: RandomSampler(range(N), generator=generator()),
    "subset": lambda: SubsetRandomSampler(range(5, N), generator=generator()),
    "weighted": lambda: WeightedRandomSampler([1.0] * N, N, generator=generator()),
}


@given(
    name=st.sampled_from(list(INDICES)),
    legs=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=4),
)
@settings(max_examples=examples(20, 80))
def test_batch_sizes_that_change_lose_and_repeat_nothing(name: str, legs: list[tuple[int, int, int]]) -> None:
    whole = list(INDICES[name]())
    state, items = None, []
    for size, batches, ahead in legs:
        sampler = batched(INDICES[name](), size)
        reader = reader_of(sampler) if state is None else loaded(sampler, state)
        run = reader.start(advance=False)
        got = had(itertools.islice(run, batches + ahead))[:batches]
        items += [index for batch in got for index in batch]
        assert items == whole[: len(items)]
        state = run.cursor(len(got)).state()
    reader = loaded(batched(INDICES[name](), 5), state)
    assert items + [index for batch in had(reader.start(advance=False)) for index in batch] == whole


class Named:
    """Items by any key: what it was asked for."""

    pure = True

    def __len__(self) -> int:
        return N

    def __getitem__(self, key: Any) -> Any:
        return key


def loading(data: Any = None, **options: Any) -> Any:
    """Return a loader that gives what its sampler says."""
    found: Any = Named() if data is None else data
    return ps.DataLoader(found, collate_fn=as_they_are, **options)


def over(sampler: Any, data: Any = None, **options: Any) -> Any:
    return loading(data, batch_size=SIZE, sampler=sampler, **options)


def batches_of(loader: Any) -> list[Any]:
    return list(loader)


def loader_of(name: str, **options: Any) -> Any:
    if name in INDICES:
        options |= {"sampler": INDICES[name](), "batch_size": SIZE}
    else:
        options |= {"batch_sampler": KINDS[name]()}
    return loading(**options)


EXECUTORS: dict[str, dict[str, Any]] = {
    "inline": {},
    "threads": {"executor": "thread", "num_workers": 2, "prefetch_factor": 3},
}


@full_only("as the others, at every batch", but=["batches", "seeded"])
@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", [*INDICES, "list of lists", "list of lists of strings", "batches"])
def test_loaders_go_on_behind_every_batch(name: str, executor: str, seed: int | None) -> None:
    options = {**EXECUTORS[executor], "seed": seed}
    states, whole = [], []
    with loader_of(name, **options) as loader:
        states.append(loader.state_dict())
        for batch in loader:
            whole.append(batch)
            states.append(loader.state_dict())
        later = batches_of(loader)
    for count, state in enumerate(states):
        with loader_of(name, **options) as loader:
            loader.load_state_dict(json.loads(json.dumps(state)))
            assert batches_of(loader) == whole[count:], f"after {count}"
            if executor == "inline":
                assert batches_of(loader) == later


@full_only("workers for each", but=["stateful", "strings"])
@pytest.mark.parametrize("name", ["seeded", "strings", "stateful", "iterator", "batches"])
def test_processes_go_on(name: str) -> None:
    options: dict[str, Any] = {"num_workers": 2, "prefetch_factor": 2}
    whole = batches_of(loader_of(name))
    with loader_of(name, **options) as loader:
        iterator = iter(loader)
        begun = [next(iterator) for _ in range(3)]
        state = loader.state_dict()
    with loader_of(name, **options) as loader:
        loader.load_state_dict(json.loads(json.dumps(state)))
        assert begun + batches_of(loader) == whole


# Samplers without a state are drawn again, with a warning.


@pytest.mark.parametrize("options", [{}, *EXECUTORS.values(), {"num_workers": 2}, {"seed": 3}])
def test_a_loader_draws_again_with_one_warning(options: dict[str, Any]) -> None:
    def make() -> Any:
        return over(ShufflingSampler(N, False), **options)

    with make() as loader:
        next(iter(loader))
        state = loader.state_dict()
    with make() as loader:
        loader.load_state_dict(state)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            rest = [batches_of(loader) for _ in range(2)]
    assert [len(epoch) for epoch in rest] == [5, 6]
    (warning,) = caught
    assert str(warning.message).startswith(
        "ShufflingSampler has no state_dict and load_state_dict, so the resume draws 4 "
    )


@pytest.mark.parametrize("name", ["list", "list of lists", "range", "stateful", "iterator", "random", "distributed"])
def test_no_warning_where_the_resume_is_exact(name: str) -> None:
    run = reader_of(KINDS[name]()).start(advance=False)
    had(itertools.islice(run, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        had(loaded(KINDS[name](), run.cursor(2).state()).start(advance=False))


def test_a_state_with_hashes_of_an_earlier_version_is_drawn_again() -> None:
    run = reader_of(batched(Seeded(range(N)))).start(advance=False)
    whole = had(run)
    state = {**run.cursor(2).state(), "entropy": {"hash": "0" * 16, "rank": 0}}
    with pytest.warns(UserWarning, match="the resume draws 8 samples again"):
        assert had(loaded(batched(Seeded(range(N))), state).start(advance=False)) == whole[2:]


def test_an_order_that_got_shorter_is_refused() -> None:
    run = reader_of(batched(Seeded(range(N)))).start(advance=False)
    had(itertools.islice(run, 3))
    with pytest.raises(
        StateError, match="Seeded had yielded 12 items when this state was taken, but now it has only 9"
    ):
        had(loaded(batched(Seeded(range(9))), run.cursor(3).state()).start(advance=False))


def test_a_state_over_a_list_of_another_length_is_refused() -> None:
    run = reader_of(batched(list(range(N)))).start(advance=False)
    had(itertools.islice(run, 1))
    with pytest.raises(StateError, match=r"samples is 23 in the state and 24 here"):
        reader_of(batched(list(range(N + 1)))).plan.read(run.cursor(1).state())


def test_another_sampler_is_refused() -> None:
    run = reader_of(batched(Seeded(range(N)))).start(advance=False)
    had(itertools.islice(run, 1))
    with pytest.raises(StateError, match=r"order is 'Seeded' in the state and 'Told' here"):
        reader_of(batched(Told(range(N)))).plan.read(run.cursor(1).state())


def test_a_sampler_that_lost_its_state_protocol_is_refused() -> None:
    class StatefulSampler(Seeded):  # of the same name
        pass

    run = reader_of(STATEFUL["stateful"]()).start(advance=False)
    had(itertools.islice(run, 1))
    reader = loaded(batched(StatefulSampler(range(N))), run.cursor(1).state())
    with pytest.raises(StateError, match="StatefulSampler has no load_state_dict"):
        had(reader.start(advance=False))


# Generators.


@pytest.mark.parametrize("name", DRAWN)
def test_the_callers_generators_are_left_alone(name: str) -> None:
    reseed()
    run = reader_of(DRAWN[name]()).start(advance=False)
    first = had(run)
    state = run.cursor(2).state()
    reseed(7)
    before = stands()
    assert had(loaded(DRAWN[name](), state).start(advance=False)) == first[2:]
    assert stands() == before


@pytest.mark.parametrize("name", [*DRAWN, "python", "numpy"])
def test_a_run_without_states_is_as_with_torch(name: str) -> None:
    def make() -> Any:
        if name in DRAWN:
            return DRAWN[name]().sampler
        return ShufflingSampler(N, name == "numpy")

    reseed()
    expected = [list(TorchBatchSampler(make(), SIZE, False)) for _ in range(2)]
    after = stands()
    reseed()
    reader = reader_of(batched(make()))
    got = []
    for _ in range(2):
        reader.cursor(0).state()  # asking changes nothing
        run = reader.start(advance=False)
        got.append(had(run))
        run.cursor(1).state()
        reader.finish(advance=False)
    assert got == expected
    assert stands() == after


def test_a_loader_without_states_is_as_torchs() -> None:
    def run(make: Callable[..., Any], name: str) -> Any:
        reseed()
        sampler = ShufflingSampler(N, name == "numpy") if name not in DRAWN else DRAWN[name]().sampler
        loader = make(Named(), SIZE, sampler=sampler, collate_fn=as_they_are)
        return [batches_of(loader) for _ in range(2)], stands()

    for name in [*DRAWN, "python", "numpy"]:
        assert run(ps.DataLoader, name) == run(torch.utils.data.DataLoader, name), name


@pytest.mark.parametrize("name", ["random, generator", "subset, generator", "weighted, generator"])
def test_an_own_generator_goes_on_where_it_was(name: str) -> None:
    whole = TORCH[name]()
    expected = [list(whole), list(whole)]
    run = reader_of(TORCH[name]()).start(advance=False)
    next(iter(run))
    batches = TORCH[name]()
    batches.sampler.generator.manual_seed(1000)
    reader = loaded(batches, run.cursor(1).state())
    assert [had(reader.start(advance=False)) for _ in range(2)] == [expected[0][1:], expected[1]]


@pytest.mark.parametrize("damage", ["", "AAAA", 3, None])
@pytest.mark.parametrize("name", ["random, generator", "replacement, generator", "subset", "weighted, generator"])
def test_damaged_generators_are_refused(name: str, damage: Any) -> None:
    reader = reader_of(KINDS[name]())
    state = reader.cursor(0).state()
    state["entropy"] = {**state["entropy"], "generator": damage}
    with pytest.raises(StateError, match="the state of the generator in this state cannot be read"):
        reader.plan.read(state)


# Lengths and sizes.


@pytest.mark.parametrize("name", ["list", "list of lists", "seeded", "seeded, dropping", "random, dropping", *TORCH])
def test_lengths_follow_the_rest(name: str) -> None:
    total = len(list(KINDS[name]()))
    reader = reader_of(KINDS[name]())
    assert len(reader.peek()) == total
    run = reader.start(advance=False)
    batches = iter(run)
    for count in range(total + 1):
        again = loaded(KINDS[name](), run.cursor(count).state())
        assert len(again.peek()) == total - count
        assert len(again.whole()) == total
        next(batches, None)


def test_a_loader_is_as_long_as_a_whole_epoch() -> None:
    for name in ("seeded", "list of lists"):
        loader = loader_of(name)
        total = len(loader)
        iterator = iter(loader)
        next(iterator)
        state = loader.state_dict()
        assert len(loader) == total
        again = loader_of(name)
        again.load_state_dict(state)
        assert len(again) == total
        assert len(batches_of(again)) == total - 1


def test_no_length_is_a_type_error() -> None:
    with pytest.raises(TypeError):
        len(reader_of(STATEFUL["batches"]()).peek())


@pytest.mark.parametrize("name", REPEATING)
def test_states_without_a_protocol_are_small(name: str) -> None:
    run = reader_of(REPEATING[name]()).start(advance=False)
    had(run)
    assert len(json.dumps(run.cursor(1).state())) < 200


def test_states_with_a_protocol_are_as_large_as_theirs() -> None:
    run = reader_of(STATEFUL["stateful"]()).start(advance=False)
    had(run)
    assert len(json.dumps(run.cursor(1).state())) < 300
    run = reader_of(STATEFUL["stateful, large"]()).start(advance=False)
    had(run)
    assert 1 << 18 < len(json.dumps(run.cursor(3).state())) < (1 << 18) + 300


# Damaged states.

DAMAGE: dict[str, Any] = {
    "order": ("Other", None),
    "unit": ("batch", 3),
    "epoch": (-1, 1.5, "0", None, True, 1 << 70),
    "consumed": (-1, 1.5, "8", None, True, 1 << 70),
    "entropy": (3, "text", None, []),
}


@pytest.mark.parametrize("gone", [False, True])
@pytest.mark.parametrize("field", DAMAGE)
@pytest.mark.parametrize("name", ["seeded", "stateful", "list"])
def test_damaged_states_are_refused(name: str, field: str, gone: bool) -> None:
    run = reader_of(KINDS[name]()).start(advance=False)
    had(itertools.islice(run, 2))
    good = run.cursor(2).state()
    plan = reader_of(KINDS[name]()).plan
    if gone:
        good.pop(field, None)  # a state without entropy has no such entry
        if field != "entropy":
            with pytest.raises(StateError, match=field):
                plan.read(good)
        return
    for value in DAMAGE[field]:
        with pytest.raises(StateError, match=field):
            plan.read({**good, field: value})


@pytest.mark.parametrize(
    "entropy",
    [
        *({"states": 3}, {"states": None}, {"states": []}),
        *({"pulls": 3}, {"pulls": None}, {"pulls": []}, {"pulls": [-1]}, {"pulls": ["1"]}, {"pulls": [1 << 70]}),
        *({"pulls": [True]}, {"pulls": {}}),
    ],
)
def test_damaged_trails_are_refused(entropy: Any) -> None:
    run = reader_of(STATEFUL["stateful"]()).start(advance=False)
    had(itertools.islice(run, 2))
    state = run.cursor(2).state()
    state["entropy"] = {**state["entropy"], **entropy}
    (field,) = entropy
    with pytest.raises(StateError, match=field):
        reader_of(STATEFUL["stateful"]()).plan.read(state)


def test_states_are_never_changed_afterwards() -> None:
    run = reader_of(STATEFUL["batches"]()).start(advance=False)
    batches = iter(run)
    states = []
    for count in range(5):
        states.append((run.cursor(count).state(), json.dumps(run.cursor(count).state())))
        next(batches)
    for state, text in states:
        assert json.dumps(state) == text
        state["entropy"]["states"]["sampler"]["place"] = 99
    assert [json.dumps(run.cursor(count).state()) for count in range(5)] == [text for _, text in states]


# Errors of a sampler.


class Broken:
    """It fails behind its second item."""

    def __iter__(self) -> Iterator[Any]:
        random.random()
        yield [1]
        yield [2]
        raise LookupError("no more")


def test_errors_of_a_sampler_pass() -> None:
    run = reader_of(Broken()).start(advance=False)
    batches = iter(run)
    assert [next(batches)[0], next(batches)[0]] == [[1], [2]]
    state = run.cursor(1).state()
    with pytest.raises(LookupError, match="no more"):
        next(batches)
    assert run.cursor(1).state() == state
    again = iter(loaded(Broken(), state).start(advance=False))
    assert next(again)[0] == [2]
    with pytest.raises(LookupError, match="no more"):
        next(again)


def test_errors_of_a_sampler_pass_through_a_loader() -> None:
    iterator = iter(loading(batch_sampler=Broken()))
    assert [next(iterator), next(iterator)] == [[1], [2]]
    with pytest.raises(LookupError, match="no more"):
        next(iterator)


# Epochs.


def test_a_torch_batch_sampler_over_one_of_ours_has_its_state() -> None:
    inner = ps.RandomSampler(range(N), shuffle="global", seed=3)
    reader = reader_of(TorchBatchSampler(inner, SIZE, False))
    run = reader.start(advance=False)
    batches = had(run)
    state = run.cursor(3).state()
    assert state == {**state, "consumed": 12, "shuffle": "global"}
    again = loaded(TorchBatchSampler(ps.RandomSampler(range(N), shuffle="global", seed=3), SIZE, False), state)
    assert had(again.start(advance=False)) == batches[3:]
    assert len(json.dumps(state)) < 300
    plan = batch_plan_of(TorchBatchSampler(inner, SIZE, False))
    assert batch_plan_of(plan) is plan


@pytest.mark.parametrize("sampler", [Told, Saying, torchs])
def test_epochs_reach_the_sampler(sampler: Callable[[Any], Any]) -> None:
    def told() -> Any:
        other = sampler(range(N))
        other.set_epoch(5)
        return list(TorchBatchSampler(other, SIZE, False))

    reader = reader_of(batched(sampler(range(N))))
    reader.set_epoch(5)
    run = reader.start(advance=False)
    batches = had(run)
    assert batches == told()
    other = sampler(range(N))
    again = loaded(batched(other), run.cursor(1).state())
    assert other.epoch == 5 if hasattr(other, "epoch") else other.now == 5
    again.set_epoch(5)
    assert had(again.start(advance=False)) == batches[1:]


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.filterwarnings("ignore:epoch 0 of this Saying starts a second time")
def test_a_sampler_that_says_its_epoch_is_not_advanced(seed: int | None) -> None:
    sampler = Saying(range(N))
    loader = over(sampler, seed=seed)
    found = []
    for epoch in (0, None, None, 4, 7):
        if epoch is not None:
            sampler.set_epoch(epoch)
        found.append((loader.epoch, [index for batch in loader for index in batch]))
    assert found == [(epoch, random.Random(epoch).sample(range(N), N)) for epoch in (0, 0, 0, 4, 7)]


@pytest.mark.parametrize("sampler", [Saying, torchs])
@pytest.mark.parametrize("batches", [1, None])
def test_one_warning_if_an_epoch_begins_twice_under_a_seed(sampler: Callable[[Any], Any], batches: int | None) -> None:
    def messages(seed: int | None) -> list[str]:
        own = sampler(range(N))
        loader = over(own, seed=seed)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for epoch in (0, 0, 0, 4, 7):
                own.set_epoch(epoch)
                list(itertools.islice(loader, batches))
        return [str(warning.message) for warning in caught]

    assert messages(None) == []
    (message,) = messages(5)
    assert f"epoch 0 of this {type(sampler(range(N))).__name__} starts a second time" in message


def test_no_warning_if_an_order_that_is_always_the_same_begins_twice() -> None:
    loader = over(DistributedSampler(range(N), 2, 0, shuffle=False), seed=5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len([list(loader) for _ in range(2)]) == 2


def test_a_sampler_that_takes_epochs_is_advanced_by_a_loader_with_a_seed() -> None:
    sampler = Told(range(N))
    loader = over(sampler, seed=5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = [[index for batch in loader for index in batch] for _ in range(3)]
    assert found == [random.Random(epoch).sample(range(N), N) for epoch in range(3)]


def test_an_epoch_set_on_the_sampler_reaches_every_loader_once() -> None:
    sampler = Saying(range(N))
    plan = batched(sampler)
    loaders = [loading(batch_sampler=plan) for _ in range(2)]
    sampler.set_epoch(3)
    for loader in loaders:
        assert [index for batch in loader for index in batch] == random.Random(3).sample(range(N), N)
        assert loader.epoch == 3


@pytest.mark.parametrize("sampler", [Told, Saying])
def test_an_epoch_set_before_the_state_is_loaded(sampler: Callable[[Any], Any]) -> None:
    """The sampler alone knows its epoch, where no loader told it."""

    def make() -> tuple[Any, Any]:
        own = sampler(range(N))
        own.set_epoch(5)
        return own, over(own)

    _, loader = make()
    iterator = iter(loader)
    begun = [next(iterator), next(iterator)]
    state = loader.state_dict()
    whole = begun + list(iterator)
    _, again = make()
    again.load_state_dict(state)
    assert begun + batches_of(again) == whole


# Keys.


class Drawing(Named):
    """Each item is a draw of the sample's own generator, beside its key."""

    def __getitem__(self, key: Any) -> Any:
        return key, float(ps.generator().random())


@pytest.mark.parametrize("name", ["seeded", "strings", "tuples", "stateful", "iterator"])
def test_samples_draw_the_same_after_a_resume(name: str) -> None:
    def make() -> Any:
        return over(INDICES[name](), Drawing(), seed=5)

    loader = make()
    states, whole = [loader.state_dict()], []
    for batch in loader:
        whole.append(batch)
        states.append(loader.state_dict())
    assert len({draw for batch in whole for _, draw in batch}) == N
    for count, state in enumerate(states):
        again = make()
        again.load_state_dict(state)
        assert batches_of(again) == whole[count:]


def test_ranks_and_epochs_draw_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    def draws(rank: int, epoch: int) -> set[float]:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        loader = over(Seeded(range(N)), Drawing(), seed=5)
        loader.set_epoch(epoch)
        return {draw for batch in loader for _, draw in batch}

    found = [draws(rank, epoch) for rank in range(2) for epoch in range(2)]
    assert len(set().union(*found)) == 4 * N
    assert draws(1, 1) == found[3]


def test_positions_are_the_batch_and_the_place_in_it() -> None:
    for name in ("seeded", "stateful", "list of lists", "batches"):
        whole = [positions.tolist() for _, positions in reader_of(KINDS[name]()).start(advance=False)]
        assert whole == [[(number << 24) + place for place in range(len(batch))] for number, batch in enumerate(whole)]
        run = reader_of(KINDS[name]()).start(advance=False)
        had(itertools.islice(run, 2))
        again = loaded(KINDS[name](), run.cursor(2).state()).start(advance=False)
        assert [positions.tolist() for _, positions in again] == whole[2:]
