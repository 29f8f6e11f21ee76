"""Samplers that are not ours: the rest of a pass is drawn again in another process, whatever was drawn ahead."""

from __future__ import annotations

import itertools
import json
import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock.loader.foreign import Foreign, source_of
from state_support import IteratorSampler, ShufflingSampler, StatefulBatches, StatefulSampler
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
from penstock.samplers.batch import BatchSampler

N = 23


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(4)


KINDS: dict[str, Callable[[], Any]] = {
    "list of lists": lambda: [[3, 1], [4], [1, 5, 9], [2, 6]],
    "list": lambda: BatchSampler(list(range(N)), 4, False),
    "random": lambda: BatchSampler(RandomSampler(range(N)), 4, False),
    "random, dropping": lambda: TorchBatchSampler(RandomSampler(range(N)), 4, True),
    "random, generator": lambda: BatchSampler(RandomSampler(range(N), generator=generator()), 4, False),
    "replacement": lambda: BatchSampler(
        RandomSampler(range(N), replacement=True, num_samples=150, generator=generator()), 4, False
    ),
    "subset": lambda: BatchSampler(SubsetRandomSampler(range(5, N)), 4, False),
    "weighted": lambda: BatchSampler(WeightedRandomSampler([1.0] * N, N, generator=generator()), 4, False),
    "distributed": lambda: BatchSampler(DistributedSampler(range(N), 2, 1, seed=3), 4, False),
    "python": lambda: BatchSampler(ShufflingSampler(N, False), 4, False),  # type: ignore[arg-type]
    "numpy": lambda: BatchSampler(ShufflingSampler(N, True), 4, False),  # type: ignore[arg-type]
    "stateful": lambda: BatchSampler(StatefulSampler(N), 4, False),  # type: ignore[arg-type]
    "stateful, torch's": lambda: TorchBatchSampler(StatefulSampler(N), 4, False),
    "iterator": lambda: BatchSampler(IteratorSampler(N), 4, True),  # type: ignore[arg-type]
    "batches": lambda: StatefulBatches(N),
}
STEADY = ["list of lists", "list", "distributed", "stateful", "stateful, torch's", "iterator", "batches"]
OWN = ["random, generator", "replacement", "weighted"]


def reseed(seed: int = 0) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def stands() -> Any:
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]


def walk(source: Any, passes: int, ahead: int) -> tuple[list[Any], list[Any]]:
    """Batches, and the state before the first and after each, and between passes; others are drawn ahead."""
    seen: list[Any] = []
    states = [(0, 0, source.peek().state(0))]
    for number in range(passes):
        run = source.start()
        drawn: list[Any] = []
        batches = iter(run)
        for count in itertools.count(1):
            drawn += itertools.islice(batches, ahead + count - len(drawn))
            if count > len(drawn):
                break
            seen.append(drawn[count - 1][0])
            states.append((len(seen), number, run.state(count)))
        source.finish()
        states.append((len(seen), number + 1, source.peek().state(0)))
    return seen, states


def check(make: Callable[[], Any], passes: int, ahead: int) -> None:
    reseed()
    seen, states = walk(source_of(make()), passes, ahead)
    whole = len(seen) // passes
    for count, number, state in states:
        reseed(99)
        source = source_of(make())
        text = json.dumps(state)
        source.load_state_dict(json.loads(text))
        assert source.peek().state(0) == state == json.loads(text)
        before = stands()
        run = source.start()
        rest = [batch for batch, _ in run]
        if number < passes:
            assert rest == seen[count : whole * (number + 1)], f"after {count}"
            assert run.first_batch == count - whole * number  # type: ignore[attr-defined]
        if count != whole * number or (count == 0 and number):
            assert stands() == before


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.filterwarnings("ignore:.*has no state_dict")
def test_a_pass_goes_on(name: str) -> None:
    check(KINDS[name], 1, 3)


@pytest.mark.parametrize("ahead", [0, 2, 200])
@pytest.mark.parametrize("name", [*STEADY, *OWN])
def test_later_passes_go_on(name: str, ahead: int) -> None:
    check(KINDS[name], 3, ahead)


@pytest.mark.parametrize("name", [*STEADY, *OWN])
def test_the_next_pass_is_that_of_the_uninterrupted_run(name: str) -> None:
    reseed()
    source = source_of(KINDS[name]())
    expected = [[batch for batch, _ in source.start()] for _ in range(4)]
    run = source_of(KINDS[name]())
    first = run.start()
    had = [batch for batch, _ in itertools.islice(first, 2)]
    again = source_of(KINDS[name]())
    again.load_state_dict(first.state(2))
    got = [had + [batch for batch, _ in again.start()], *([batch for batch, _ in again.start()] for _ in range(3))]
    assert got == expected


@given(
    name=st.sampled_from(STEADY + OWN),
    stops=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    ahead=st.integers(0, 4),
)
@settings(max_examples=60)
def test_chains_of_resumes(name: str, stops: list[int], ahead: int) -> None:
    whole = [batch for batch, _ in source_of(KINDS[name]()).start()]
    state, had = None, 0
    for stop in stops:
        source = source_of(KINDS[name]())
        if state is not None:
            source.load_state_dict(state)
        run = source.start()
        got = [batch for batch, _ in itertools.islice(run, stop + ahead)][:stop]
        assert got == whole[had : had + stop]
        had += len(got)
        state = json.loads(json.dumps(run.state(len(got))))


def test_the_callers_generators_are_left_alone() -> None:
    reseed()
    run = source_of(KINDS["random"]()).start()
    first = [batch for batch, _ in run]
    state = run.state(2)
    assert list(state["generators"]) == ["torch"]
    reseed(7)
    before = stands()
    source = source_of(KINDS["random"]())
    source.load_state_dict(state)
    assert [batch for batch, _ in source.start()] == first[2:]
    assert stands() == before


def test_without_a_state_everything_is_as_with_torch() -> None:
    for name in ("random", "subset", "python", "numpy"):
        reseed()
        expected = [list(KINDS[name]()) for _ in range(2)]
        after = stands()
        reseed()
        source = source_of(KINDS[name]())
        got = []
        for _ in range(2):
            source.peek().state(0)  # asking changes nothing
            run = source.start()
            got.append([batch for batch, _ in run])
            run.state(1)
        assert got == expected
        assert stands() == after


def test_an_own_generator_goes_on_where_it_was() -> None:
    make = KINDS["random, generator"]
    whole = make()
    expected = [list(whole), list(whole)]
    run = source_of(make()).start()
    next(iter(run))
    batches = make()
    batches.sampler.generator.manual_seed(1000)
    source = source_of(batches)
    source.load_state_dict(run.state(1))
    assert [[batch for batch, _ in source.start()] for _ in range(2)] == [expected[0][1:], expected[1]]


def test_sizes() -> None:
    for name in ("list of lists", "list", "distributed"):
        run = source_of(KINDS[name]()).start()
        assert len(json.dumps(run.state(1))) < 100
    run = source_of(KINDS["stateful"]()).start()
    list(run)
    assert len(json.dumps(run.state(1))) < 300


def test_lengths_follow_the_rest() -> None:
    for name in ("list", "list of lists", "random, dropping", "distributed"):
        source = source_of(KINDS[name]())
        total = len(list(KINDS[name]()))
        assert len(source) == total
        source.load_state_dict({**source.peek().state(0), "batches": 2})
        assert len(source) == total - 2


def test_a_torch_batch_sampler_over_one_of_ours_is_ours() -> None:
    inner = ps.RandomSampler(range(N), shuffle="global", seed=3)
    source = source_of(TorchBatchSampler(inner, 4, False))
    run = source.start()
    batches = [batch for batch, _ in run]
    source.load_state_dict(run.state(3))
    assert [batch for batch, _ in source.start()] == batches[3:]
    assert len(json.dumps(run.state(3))) < 300
    assert not isinstance(source, Foreign)
    assert source_of(source) is source


def test_epochs_reach_the_sampler() -> None:
    sampler = DistributedSampler(range(N), 2, 0, seed=3)
    source = source_of(BatchSampler(sampler, 4, False))
    source.set_epoch(5)
    run = source.start()
    batches = [batch for batch, _ in run]
    other = DistributedSampler(range(N), 2, 0, seed=3)
    source = source_of(BatchSampler(other, 4, False))
    source.load_state_dict(run.state(1))
    assert other.epoch == 5
    source.set_epoch(5)
    assert [batch for batch, _ in source.start()] == batches[1:]


def test_an_unknown_sampler_is_skipped_aloud() -> None:
    source = source_of(KINDS["python"]())
    state = {**source.peek().state(0), "batches": 2}
    source.load_state_dict(state)
    with pytest.warns(UserWarning, match="ShufflingSampler has no state_dict.*first 2 batches"):
        next(iter(source.start()))
    for name in ("list", "random", "stateful", "distributed"):
        source = source_of(KINDS[name]())
        run = source.start()
        next(iter(run))
        source.load_state_dict(run.state(1))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            next(iter(source.start()))


@pytest.mark.parametrize(
    "damage",
    [
        *({"batches": -1}, {"batches": None}, {"epoch": 1.5}, {"version": 99}),
        *({"sampler": 3}, {"sampler_epoch": "1"}, {"generators": 3}, {"own": "text"}),
    ],
)
def test_damaged_states_are_refused(damage: Any) -> None:
    source = source_of(KINDS["stateful"]())
    with pytest.raises(StateError):
        source.load_state_dict({**source.peek().state(0), **damage})


def test_damaged_generators_are_refused_where_they_are_set() -> None:
    for damage in ({"own": [""]}, {"own": ["AAAA"]}, {"generators": {"torch": "AAAA"}}, {"generators": {"torch": 3}}):
        source = source_of(KINDS["random, generator"]())
        source.load_state_dict({**source.peek().state(0), **damage})
        with pytest.raises(StateError, match="generator in this state"):
            next(iter(source.start()))


def test_errors_of_a_sampler_pass_and_leave_the_generators() -> None:
    class Broken:
        def __iter__(self) -> Any:
            random.random()
            yield [1]
            raise LookupError("no more")

    source = source_of(Broken())
    source.load_state_dict({**source.peek().state(0), "batches": 0})
    before = random.getstate()
    run = iter(source.start())
    assert next(run)[0] == [1]
    assert random.getstate() == before
    with pytest.raises(LookupError):
        next(run)


def test_sequential_needs_no_generator() -> None:
    assert "generators" not in source_of(BatchSampler(SequentialSampler(range(N)), 4, False)).peek().state(0)
