"""Samplers made before the process group find their rank when they are first used, and notice when it changes."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from penstock.errors import PartitionError
from penstock.samplers import (
    DistributedSampler,
    GroupedBatchSampler,
    InfiniteSampler,
    SequentialSampler,
    TokenBudgetBatchSampler,
)

GROUPS = [0, 1] * 10

MAKERS: dict[str, Callable[..., Any]] = {
    "distributed": lambda **given: DistributedSampler(range(20), shuffle="global", **given),
    "infinite": lambda **given: InfiniteSampler(range(20), **given),
    "grouped": lambda **given: GroupedBatchSampler(SequentialSampler(range(20)), GROUPS, 2, **given),
    "token-budget": lambda **given: TokenBudgetBatchSampler([3, 5] * 10, 10, **given),
    "grouped-distributed": lambda **given: GroupedBatchSampler(
        DistributedSampler(range(20), shuffle="global", **given), GROUPS, 2
    ),
}
Make = Callable[..., Any]


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Make:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    maker = MAKERS[request.param]
    names = ("rank", "num_replicas" if "distributed" in request.param else "world_size")
    return lambda *given: maker(**dict(zip(names, given, strict=False)))


@pytest.fixture
def init(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """What torch says after init_process_group; a real group would need other processes."""

    def initialise(rank: int, world_size: int) -> None:
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_rank", lambda group=None: rank)
        monkeypatch.setattr(dist, "get_world_size", lambda group=None: world_size)

    return initialise


def take(sampler: Any) -> list[Any]:
    return list(itertools.islice(sampler, 12))


def test_a_group_made_after_the_sampler_counts(make: Make, init: Callable[[int, int], None]) -> None:
    sampler = make()
    sampler.set_epoch(1)
    init(1, 2)
    expected = make(1, 2)
    expected.set_epoch(1)
    assert take(sampler) == take(expected) != take(make(0, 1))
    assert sampler.rank == 1
    assert getattr(sampler, "num_replicas", getattr(sampler, "world_size", None)) == 2


@pytest.mark.parametrize("use", [take, lambda s: s.state_dict(), lambda s: s.rank, pickle.dumps])
def test_a_group_that_disagrees_is_noticed(make: Make, init: Callable[[int, int], None], use: Any) -> None:
    sampler = make()
    use(sampler)
    init(0, 1)
    take(sampler)
    init(1, 2)
    with pytest.raises(PartitionError, match=r"first used as rank 0 of 1, and now the process group says rank 1 of 2"):
        take(sampler)


def test_what_was_given_is_kept(make: Make, init: Callable[[int, int], None]) -> None:
    sampler = make(1, 3)
    expected = take(make(1, 3))
    take(sampler)
    init(1, 2)
    assert take(sampler) == expected
    assert sampler.rank == 1


def test_the_rank_travels(make: Make, init: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    init(1, 2)
    sampler = make()
    payload = pickle.dumps(sampler)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)  # as in a worker on another machine
    assert pickle.loads(payload).rank == 1
    assert take(pickle.loads(payload)) == take(make(1, 2))


@pytest.mark.parametrize("use", [lambda s: None, take], ids=["unused", "used"])
def test_the_process_that_reads_a_pickle_knows_better(make: Make, monkeypatch: pytest.MonkeyPatch, use: Any) -> None:
    """A program pickles before it starts its ranks, which set RANK and WORLD_SIZE, or make a process group."""
    sampler = make()
    use(sampler)
    payload = pickle.dumps(sampler)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert take(pickle.loads(payload)) == take(make(1, 2)) != take(make(0, 1))
    assert take(pickle.loads(pickle.dumps(pickle.loads(payload)))) == take(make(1, 2))
    assert take(pickle.loads(pickle.dumps(make(0, 3)))) == take(make(0, 3))
    assert sampler.rank == (0 if use is take else 1), "pickling fixes nothing"


def test_a_worker_has_the_rank_of_the_process_that_started_it(
    make: Make, init: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the environment says, which the group of that process overrides."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    init(1, 2)
    payload = pickle.dumps(make())
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.utils.data._utils.worker, "_worker_info", object())  # as torch and our workers do
    assert take(pickle.loads(payload)) == take(make(1, 2))


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_a_sampler_can_be_made_and_pickled_in_a_world_that_is_half_known(
    make: Make, init: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "1")
    sampler = make()
    payload = pickle.dumps(sampler)
    for one in (sampler, pickle.loads(payload)):
        with pytest.raises(PartitionError, match=f"only {name} is set .* or initialise torch.distributed first"):
            take(one)
    init(1, 2)
    assert take(sampler) == take(pickle.loads(payload)) == take(make(1, 2))


def test_one_of_the_two_is_enough_for_a_distributed_sampler_alone(init: Callable[[int, int], None]) -> None:
    sampler = DistributedSampler(range(20), num_replicas=4)
    init(1, 2)
    assert (sampler.rank, sampler.num_replicas) == (1, 4)
    with pytest.raises(PartitionError, match="give both"):
        InfiniteSampler(range(20), rank=1)
    with pytest.raises(PartitionError, match="give both"):
        GroupedBatchSampler(SequentialSampler(range(20)), GROUPS, 2, world_size=2)
