"""What every sampler promises, checked for every one of them.

A new sampler is one entry in `CASES`; everything below then applies to it.
"""

from __future__ import annotations

import copy
import gc
import itertools
import json
import pickle
import random
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from busy_support import HANG
from entries_support import closed, opened
from full_run import full_only
from interpreter_support import run
from plan_support import bound

from penstock.errors import SamplerError, StateError
from penstock.order import permutation
from penstock.samplers import (
    BatchSampler,
    DistributedSampler,
    GroupedBatchSampler,
    InfiniteSampler,
    IterationBasedBatchSampler,
    RandomSampler,
    SequentialSampler,
    TokenBudgetBatchSampler,
    WeightedRandomSampler,
)

N = 37
TAKE = 90  # more than any finite case yields; of the endless ones, so many
WEIGHTS = np.random.default_rng(0).exponential(size=N)
GROUPS = (np.arange(N) * 7) % 3


class Case(NamedTuple):
    make: Callable[..., Any]  # make(n=37, world=1, rank=0)
    elastic: bool = False  # a state loads on another number of ranks
    draws: bool = False  # a pass begins with a draw from torch's global generator
    same_next: bool = True  # after a resume in another process the next pass is the one there would have been
    endless: bool = False


def _distributed(n: int, world: int, rank: int, shuffle: Any = "global", **options: Any) -> DistributedSampler:
    return DistributedSampler(range(n), world, rank, shuffle, 3, **options)


def _generator() -> torch.Generator:
    """A generator that begins elsewhere after another `torch.manual_seed`: what a resume needs is in the state."""
    return torch.Generator().manual_seed(torch.initial_seed() % 1000)


def _grouped(sampler: Any, n: int, size: int = 4, **options: Any) -> GroupedBatchSampler:
    return GroupedBatchSampler(sampler, np.resize(GROUPS, n), size, **options)


def _budget(n: int, world: int, rank: int, **options: Any) -> TokenBudgetBatchSampler:
    lengths = np.resize(np.random.default_rng(1).integers(1, 30, N), n)
    return TokenBudgetBatchSampler(lengths, 60, seed=3, classes=5, world_size=world, rank=rank, **options)


def _foreign_batches(n: int) -> Any:
    return torch.utils.data.BatchSampler(torch.utils.data.DistributedSampler(range(n), 2, 0), 4, drop_last=False)


def _weights(n: int) -> Any:
    return np.resize(WEIGHTS, n)


CASES: dict[str, Case] = {
    "sequential": Case(lambda n, w, r: SequentialSampler(range(n))),
    "random": Case(lambda n, w, r: RandomSampler(range(n)), draws=True, same_next=False),
    "random-80": Case(lambda n, w, r: RandomSampler(range(n), num_samples=80), draws=True, same_next=False),
    "random-replacement": Case(lambda n, w, r: RandomSampler(range(n), True, 50), draws=True, same_next=False),
    "random-generator": Case(lambda n, w, r: RandomSampler(range(n), generator=_generator())),
    "random-generator-80": Case(lambda n, w, r: RandomSampler(range(n), False, 80, generator=_generator())),
    "random-generator-replacement": Case(lambda n, w, r: RandomSampler(range(n), True, 50, generator=_generator())),
    "random-global": Case(lambda n, w, r: RandomSampler(range(n), shuffle="global", seed=4)),
    "random-block": Case(lambda n, w, r: RandomSampler(range(n), shuffle="block", block_size=5, window=2)),
    "random-global-80": Case(lambda n, w, r: RandomSampler(range(n), num_samples=80, shuffle="global")),
    "random-global-replacement": Case(lambda n, w, r: RandomSampler(range(n), True, 50, shuffle="global")),
    "distributed-torch": Case(lambda n, w, r: _distributed(n, w, r, True), elastic=True),
    "distributed-global": Case(lambda n, w, r: _distributed(n, w, r), elastic=True),
    "distributed-block": Case(lambda n, w, r: _distributed(n, w, r, "block", block_size=4, window=3), elastic=True),
    "distributed-none": Case(lambda n, w, r: _distributed(n, w, r, False), elastic=True),
    "distributed-uneven": Case(lambda n, w, r: _distributed(n, w, r, remainder="uneven"), elastic=True),
    "infinite": Case(lambda n, w, r: InfiniteSampler(range(n), rank=r, world_size=w), elastic=True, endless=True),
    "infinite-torch": Case(
        lambda n, w, r: InfiniteSampler(range(n), shuffle=True, rank=r, world_size=w), elastic=True, endless=True
    ),
    "weighted-seed": Case(lambda n, w, r: WeightedRandomSampler(_weights(n), 60, seed=2)),
    "weighted": Case(lambda n, w, r: WeightedRandomSampler(_weights(n), 60), draws=True, same_next=False),
    "weighted-generator": Case(lambda n, w, r: WeightedRandomSampler(_weights(n), 60, generator=_generator())),
    "weighted-once": Case(lambda n, w, r: WeightedRandomSampler(_weights(n), 30, False, seed=2)),
    "batch": Case(lambda n, w, r: BatchSampler(_distributed(n, w, r), 4, False), elastic=True),
    "batch-drop": Case(lambda n, w, r: BatchSampler(RandomSampler(range(n), shuffle="global"), 4, True)),
    "batch-generator-drop": Case(
        lambda n, w, r: BatchSampler(RandomSampler(range(n), generator=_generator()), 4, True)
    ),
    "batch-weighted-generator-drop": Case(
        lambda n, w, r: BatchSampler(WeightedRandomSampler(_weights(n), 30, generator=_generator()), 4, True)
    ),
    "batch-random": Case(lambda n, w, r: BatchSampler(RandomSampler(range(n)), 4, False), draws=True, same_next=False),
    "batch-foreign": Case(lambda n, w, r: BatchSampler(list(range(n)), 4, False)),
    "batch-infinite": Case(
        lambda n, w, r: BatchSampler(InfiniteSampler(range(n), rank=r, world_size=w), 4, False),
        elastic=True,
        endless=True,
    ),
    "grouped": Case(lambda n, w, r: _grouped(_distributed(n, w, r), n), elastic=True),
    "grouped-first": Case(lambda n, w, r: _grouped(_distributed(n, w, r), n, order="first"), elastic=True),
    "grouped-drop": Case(lambda n, w, r: _grouped(_distributed(n, w, r), n, 3, drop_last=True)),
    "grouped-random": Case(
        lambda n, w, r: _grouped(RandomSampler(range(n)), n, world_size=1, rank=0), draws=True, same_next=False
    ),
    "grouped-generator-drop": Case(
        lambda n, w, r: _grouped(
            RandomSampler(range(n), True, 50, generator=_generator()), n, world_size=1, rank=0, drop_last=True
        )
    ),
    "grouped-weighted": Case(
        lambda n, w, r: _grouped(WeightedRandomSampler(_weights(n), 60, seed=2), n, world_size=1, rank=0)
    ),
    "grouped-class": Case(lambda n, w, r: _grouped(_distributed(n, w, r), n, order="class"), elastic=True),
    "grouped-class-drop": Case(
        lambda n, w, r: _grouped(RandomSampler(range(n), shuffle="global"), n, 3, order="class", drop_last=True)
    ),
    "token-budget": Case(_budget, elastic=True),
    "token-budget-drop": Case(lambda n, w, r: _budget(n, w, r, drop_last=True)),
    "iterations-token-budget": Case(lambda n, w, r: IterationBasedBatchSampler(_budget(n, w, r), 25)),
    "iterations": Case(lambda n, w, r: IterationBasedBatchSampler(BatchSampler(_distributed(n, w, r), 4, False), 25)),
    "iterations-start": Case(
        lambda n, w, r: IterationBasedBatchSampler(BatchSampler(_distributed(n, w, r), 4, False), 25, 13)
    ),
    "iterations-grouped": Case(lambda n, w, r: IterationBasedBatchSampler(_grouped(_distributed(n, w, r), n), 25)),
    "iterations-random": Case(
        lambda n, w, r: IterationBasedBatchSampler(BatchSampler(RandomSampler(range(n)), 4, False), 8),
        draws=True,
        same_next=False,
    ),
    "iterations-generator-drop": Case(
        lambda n, w, r: IterationBasedBatchSampler(
            BatchSampler(RandomSampler(range(n), generator=_generator()), 4, True), 25
        )
    ),
    "iterations-weighted": Case(
        lambda n, w, r: IterationBasedBatchSampler(
            _grouped(WeightedRandomSampler(_weights(n), 40, seed=2), n, world_size=1, rank=0), 25
        )
    ),
    "iterations-foreign": Case(lambda n, w, r: IterationBasedBatchSampler(_foreign_batches(n), 13)),
}


@pytest.fixture(params=CASES, ids=list(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    torch.manual_seed(11)
    return CASES[request.param]


def make(case: Case, n: int = N, world: int = 1, rank: int = 0) -> Any:
    return case.make(n, world, rank)


def take(sampler: Any, count: int = TAKE) -> list[Any]:
    return list(itertools.islice(sampler, count))


def through_json(state: Any) -> Any:
    return json.loads(json.dumps(state))


def test_resume_at_every_position(case: Case) -> None:
    sampler = make(case)
    sampler.set_epoch(1)
    states, items = [through_json(sampler.state_dict())], []
    for item in itertools.islice(sampler, TAKE):
        items.append(item)
        states.append(through_json(sampler.state_dict()))
    following = None if case.endless else take(sampler)
    for count, state in enumerate(states):
        torch.manual_seed(count + 100)
        fresh = make(case)
        fresh.load_state_dict(state)
        assert fresh.epoch == 1
        assert through_json(fresh.state_dict()) == state
        fresh.set_epoch(1)  # the epoch of the state keeps its place
        if not case.endless:
            assert len(fresh) == len(items) - count
        assert take(fresh, TAKE - count) == items[count:], count
        if following is not None and case.same_next:
            assert take(fresh) == following, count


def test_state_loaded_half_way_takes_effect_at_the_next_iter(case: Case) -> None:
    sampler = make(case)
    items = take(sampler, 3)
    state = sampler.state_dict()
    iterator = iter(sampler)
    if case.draws:
        sampler = make(case)
    else:
        next(iterator)
    sampler.load_state_dict(state)
    rest = take(sampler)
    again = make(case)
    again.load_state_dict(state)
    assert rest[: TAKE - 3] == take(again)[: TAKE - 3]
    assert len(items) == 3


def test_asking_before_the_first_epoch_disturbs_nothing(case: Case) -> None:
    torch.manual_seed(3)
    plain = make(case)
    expected, after = take(plain), torch.get_rng_state()
    torch.manual_seed(3)
    asked = make(case)
    initial = through_json(asked.state_dict())
    assert through_json(asked.state_dict()) == initial
    if not case.endless:
        assert len(asked) == len(expected)
    assert take(asked) == expected
    assert torch.equal(torch.get_rng_state(), after)
    torch.manual_seed(4)
    replayed = make(case)
    replayed.load_state_dict(initial)
    assert take(replayed) == expected


def test_len_is_what_is_yielded(case: Case) -> None:
    sampler = make(case)
    if case.endless:
        with pytest.raises(TypeError):
            len(sampler)
        return
    for epoch in range(3):
        before = len(sampler)
        sampler.set_epoch(epoch)
        announced = len(sampler)
        assert len(take(sampler)) == announced == len(sampler)
        assert before >= 0


def test_set_epoch_after_len_is_not_stale(case: Case) -> None:
    if case.draws:
        pytest.skip("every pass draws anew")
    asked, plain = make(case), make(case)
    if not case.endless:
        len(asked)
    asked.state_dict()
    for sampler in (asked, plain):
        sampler.set_epoch(2)
    assert take(asked) == take(plain)


def test_items_are_python_integers(case: Case) -> None:
    for item in take(make(case)):
        members = item if isinstance(item, list) else [item]
        assert all(type(index) is int and 0 <= index < N for index in members)


def test_global_generators_are_left_alone(case: Case) -> None:
    sampler = make(case)
    random.seed(1)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    take(sampler)
    sampler.load_state_dict(sampler.state_dict())
    assert np.random.get_state()[1].tolist() == before[1]
    assert random.getstate() == before[2]
    if not case.draws:
        assert torch.equal(torch.get_rng_state(), before[0])


@full_only("many epochs; a leak")
def test_memory_is_flat_over_epochs() -> None:
    def run(sampler: Any, epochs: range) -> int:
        for epoch in epochs:
            sampler.set_epoch(epoch)
            for number, _ in enumerate(itertools.islice(sampler, TAKE)):
                if number % 10 == 0:
                    sampler.state_dict()
        # Bounded by the number of its tables; its dict doubles now and then, and shrinks.
        permutation._tables.cache_clear()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    grown = {}
    for name, case in CASES.items():
        torch.manual_seed(11)
        sampler = make(case)
        grown[name] = -run(sampler, range(5)) + run(sampler, range(5, 13))
    tracemalloc.stop()
    assert [name for name, grew in grown.items() if grew >= 16_000] == []


def test_foreign_states_are_refused(case: Case) -> None:
    sampler = make(case)
    good = sampler.state_dict()
    other = make(case, n=N + 1).state_dict()
    if "foreign" not in json.dumps(good) and "samples" in json.dumps(good):
        with pytest.raises(StateError, match=r"samples|weights"):
            sampler.load_state_dict(other)
    entries = opened(good)
    for damage in (
        {},
        {**entries, "version": 99},
        {**entries, "epoch": -1},
        {**entries, "epoch": "0"},
        {name: value for name, value in entries.items() if name != "epoch"},
        *({**entries, count: -1} for count in ("consumed", "iteration", "yielded") if count in entries),
    ):
        with pytest.raises(StateError):
            sampler.load_state_dict(closed(damage))
    sampler.load_state_dict(good)


def test_other_order_version_is_refused(case: Case) -> None:
    sampler = make(case)
    text = json.dumps(opened(sampler.state_dict()))
    if "order_version" in text:
        with pytest.raises(StateError, match=r"version 0 of orders, and Penstock .* reads version 1"):
            sampler.load_state_dict(closed(json.loads(text.replace('"order_version": 1', '"order_version": 0'))))


def test_negative_epoch_is_refused(case: Case) -> None:
    with pytest.raises(ValueError, match="epoch must be 0 or more"):
        make(case).set_epoch(-1)


def test_an_epoch_that_no_state_can_hold_is_refused(case: Case) -> None:
    with pytest.raises(SamplerError, match=r"epoch must be below 2\*\*62"):
        make(case).set_epoch(1 << 62)


def test_copies_begin_where_the_original_would(case: Case) -> None:
    sampler = make(case)
    if case.draws:
        sampler.load_state_dict(sampler.state_dict())
    else:
        take(sampler, 3)
        half_way = pickle.loads(pickle.dumps(sampler))
        assert opened(half_way.state_dict()) == bound(half_way).cursor(0).state(), "a copy has no pass that runs"
    iterator = iter(sampler)
    if not case.draws:
        next(iterator)
        sampler.load_state_dict(sampler.state_dict())
    copies = [copy.deepcopy(sampler), pickle.loads(pickle.dumps(sampler))]
    expected = take(sampler)
    assert [take(copied) for copied in copies] == [expected, expected]


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.elastic])
@pytest.mark.parametrize("worlds", [(3, 2), (1, 4), (4, 1), (2, 5)])
def test_another_number_of_ranks_goes_on(name: str, worlds: tuple[int, int]) -> None:
    case, (before, after) = CASES[name], worlds
    whole = take(make(case), N if case.endless and "batch" not in name else TAKE)
    expected = Counter(index for item in whole for index in (item if isinstance(item, list) else [item]))
    for steps in (0, 1, 2):
        ranks = [make(case, world=before, rank=rank) for rank in range(before)]
        had = [take(sampler, steps) for sampler in ranks]
        states = [through_json(sampler.state_dict()) for sampler in ranks]
        assert all(state == states[0] for state in states), "all ranks agree on what the job has had"
        resumed = [make(case, world=after, rank=rank) for rank in range(after)]
        for sampler in resumed:
            sampler.load_state_dict(states[0])
        if case.endless:
            dealt = had + [take(sampler, 40) for sampler in resumed]
        else:
            lengths = {len(sampler) for sampler in resumed}
            assert len(lengths) == 1 or name == "distributed-uneven"
            dealt = had + [take(sampler) for sampler in resumed]
        seen = Counter(i for items in dealt for item in items for i in (item if isinstance(item, list) else [item]))
        if case.endless:
            assert set(seen) == set(range(N))
            assert max(seen.values()) - min(seen.values()) <= 1 + ("batch" in name)
        else:
            assert not expected - seen, "nothing is lost"
            repeated = sum((seen - expected).values())
            assert repeated <= (after - 1) * (4 if isinstance(whole[0], list) else 1), "only padding is repeated"


def test_pickled_and_run_in_another_process(tmp_path: Path) -> None:
    program = (
        "import itertools, json, pickle, sys\n"
        "samplers = pickle.load(open(sys.argv[1], 'rb'))\n"
        f"json.dump([list(itertools.islice(s, {TAKE})) for s in samplers], sys.stdout)\n"
    )
    samplers = []
    for case in CASES.values():
        sampler = make(case)
        sampler.set_epoch(1)
        if case.draws:
            sampler.load_state_dict(sampler.state_dict())  # what is drawn is in the state
        else:
            take(sampler, 2)
            sampler.load_state_dict(sampler.state_dict())
        samplers.append(sampler)
    (tmp_path / "pickled").write_bytes(pickle.dumps(samplers))
    expected = [take(sampler) for sampler in samplers]
    done = run(["-c", program, str(tmp_path / "pickled")], timeout=HANG)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == expected
