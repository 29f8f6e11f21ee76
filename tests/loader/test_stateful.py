"""The parts of a loader's state that are the user's, without a loader: workers that work ahead, one consumer."""

from __future__ import annotations

import copy
import json
import random
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from state_support import (
    BothStream,
    BufferStream,
    ChangingStream,
    CountingCollate,
    CountingMap,
    FailingStream,
    HubStream,
    IteratorStream,
    PlainStream,
    StatefulStream,
    TensorMap,
    UnevenStream,
    as_they_are,
)

from penstock.errors import StateError
from penstock.loader.generators import generator_states, set_generators
from penstock.loader.snapshots import Snapshots, capture, has_state, reopen, restore, thaw
from penstock.loader.stateful import LayoutError, Trail, WorkerStates
from penstock.loader.work import Made, Work

STREAMS: dict[str, Callable[[], Any]] = {
    kind.__name__: lambda kind=kind: kind(23)  # type: ignore[misc]
    for kind in (
        *(PlainStream, StatefulStream, IteratorStream, BothStream, HubStream, ChangingStream),
        *(BufferStream, FailingStream, UnevenStream),
    )
}


class Worker:
    """Holds a copy of the data set and makes batches of its items."""

    def __init__(self, dataset: Any, number: int, total: int, size: int, collate_fn: Any, every: int | None) -> None:
        self.dataset, self.collate_fn = dataset, collate_fn
        self.number, self.total, self.size = number, total, size
        self.snapshots = Snapshots(every=every)
        self.items: Iterator[Any] = iter(())
        self.short = False

    def __enter__(self) -> None:
        from torch.utils.data._utils import worker

        info = SimpleNamespace(id=self.number, num_workers=self.total, seed=0, dataset=self.dataset)
        worker._worker_info = info if self.total else None

    def __exit__(self, *exc: object) -> None:
        from torch.utils.data._utils import worker

        worker._worker_info = None

    def begin(self, earlier: int) -> Iterator[Any]:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(max(0, self.epoch - earlier))
        self.items, self.short = iter(self.dataset), False
        return self.items

    def start(self, epoch: int, resume: Any) -> None:
        self.epoch = epoch
        with self:
            if resume is None:
                self.begin(0)
            else:
                reopen(resume, self.dataset, self.collate_fn, self.begin, self.make)

    def make(self) -> Any:
        items = []
        while len(items) < self.size and not self.short:
            try:
                items.append(next(self.items))
            except StopIteration:
                self.short = True
        if not items:
            raise StopIteration
        return self.collate_fn(items)

    def made(self) -> Any:
        """A `Made`, an error, or None at the end."""
        with self:
            try:
                batch = self.make()
            except StopIteration:
                return None
            except LookupError as error:
                return error
            state = self.snapshots.take(self.dataset, self.items, self.collate_fn, ended=self.short)
        return Made(batch, Work(), 0, self.number, state)


class Loader:
    """Reads the workers in turn, each some batches ahead."""

    def __init__(
        self, make: Callable[[], Any], workers: int, *, ahead: int = 2, size: int = 3, fresh: bool = False,
        every: int | None = None, collate: Any = as_they_are,
    ) -> None:  # fmt: skip
        self.pristine, self.collate = make(), collate
        self.workers, self.ahead, self.size, self.fresh, self.every = workers, ahead, size, fresh, every
        self.states = WorkerStates(workers, stream=True, initial=capture(self.pristine, None, collate))
        self.crew: list[Worker] = []
        self.epoch = 0

    def state_dict(self) -> Any:
        return {"epoch": self.epoch, "workers": self.states.state()}

    def load_state_dict(self, state: Any) -> None:
        self.epoch = state["epoch"]
        self.states.load(state["workers"])
        self.loaded = True
        self.crew = []

    loaded = False

    def __iter__(self) -> Iterator[Any]:
        self.states.begin(fresh=self.fresh)
        total = max(1, self.workers)
        if not self.crew or self.fresh or self.loaded:
            copies = [copy.deepcopy((self.pristine, self.collate)) for _ in range(total)]
            self.crew = [Worker(d, i, self.workers, self.size, c, self.every) for i, (d, c) in enumerate(copies)]
            for worker in self.crew:
                worker.start(self.epoch, self.states.resume(worker.number) if self.loaded else None)
        else:
            for worker in self.crew:
                worker.start(self.epoch, None)
        self.loaded = False
        ready: list[deque[Any]] = [deque() for _ in range(total)]
        alive, turn = [True] * total, self.states.next
        while any(alive):
            for worker in self.crew:
                while len(ready[worker.number]) <= self.ahead:
                    ready[worker.number].append(worker.made())
            if alive[turn]:
                made = ready[turn].popleft()
                if made is None:
                    alive[turn] = False
                elif isinstance(made, Exception):
                    self.states.failed(turn)
                    yield str(made)
                else:
                    self.states.delivered(made)
                    yield made.batch
            turn = (turn + 1) % total
        self.epoch += 1
        self.states.begin(fresh=self.fresh)


def check(make: Callable[[], Loader], passes: int = 3) -> None:
    """From the state after every batch, in and between passes, the same batches follow."""
    loader, seen, states = make(), [], []
    states.append((0, loader.state_dict()))
    for _ in range(passes):
        for batch in loader:
            seen.append(copy.deepcopy(batch))
            states.append((len(seen), loader.state_dict()))
        states.append((len(seen), loader.state_dict()))
    for count, state in states:
        other = make()
        text = json.dumps(state)
        other.load_state_dict(json.loads(text))
        assert other.state_dict() == state == json.loads(text)
        rest = [batch for _ in range(passes - state["epoch"]) for batch in other]
        assert json.dumps(rest) == json.dumps(seen[count:]), f"after {count} of {len(seen)}"


@pytest.mark.parametrize("fresh", [False, True], ids=["same objects", "fresh workers"])
@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("name", STREAMS)
def test_every_kind_of_stream_goes_on(name: str, workers: int, fresh: bool) -> None:
    check(lambda: Loader(STREAMS[name], workers, fresh=fresh))


@given(
    name=st.sampled_from(sorted(STREAMS)),
    workers=st.integers(0, 4),
    ahead=st.integers(0, 5),
    size=st.integers(1, 25),
    fresh=st.booleans(),
    every=st.sampled_from([None, 1, 2, 7]),
)
@settings(max_examples=20)
def test_ahead_batch_size_and_interval_change_nothing(
    name: str, workers: int, ahead: int, size: int, fresh: bool, every: int | None
) -> None:
    check(lambda: Loader(STREAMS[name], workers, ahead=ahead, size=size, fresh=fresh, every=every))


def test_collate_functions_have_a_state_too() -> None:
    check(lambda: Loader(lambda: PlainStream(23), 2, collate=CountingCollate(), fresh=True))
    check(lambda: Loader(lambda: StatefulStream(23), 2, collate=CountingCollate()))


def test_large_states_are_taken_less_often() -> None:
    snapshots = Snapshots()
    dataset = BufferStream(100)
    taken = [snapshots.take(dataset, None, as_they_are) is not None for _ in range(40)]
    assert [number for number, yes in enumerate(taken) if yes] == [0, 17, 34]


def test_a_state_never_changes_again() -> None:
    dataset = TensorMap(4)
    frozen = capture(dataset, None, as_they_are)
    assert frozen is not None
    states = WorkerStates(1, stream=False)
    states.delivered(Made(None, Work(), 0, 0, frozen))
    first = states.state()
    assert first is not None
    dataset[2]
    assert thaw(frozen)["dataset"]["seen"].tolist() == [0] * 4
    first["workers"]["0"]["snapshot"]["dataset"]["seen"] += 9
    again = states.state()
    assert again is not None
    assert again["workers"]["0"]["snapshot"]["dataset"]["nested"]["list"][0].tolist() == [0] * 4
    states.load(again)
    again["workers"]["0"]["snapshot"]["dataset"]["seen"] += 9
    fresh = TensorMap(4)
    restore(states.resume(0), fresh, None, as_they_are)
    assert fresh.seen.tolist() == [0] * 4


class Unpicklable:
    """A state that can be copied and not pickled."""

    def __init__(self) -> None:
        self.parts: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        return {"parts": self.parts, "call": lambda: 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.parts = state["parts"]


def test_a_state_that_cannot_be_pickled_is_copied() -> None:
    item = Unpicklable()
    frozen = capture(item, None, None)
    item.parts.append(1)
    assert isinstance(frozen, dict)
    assert thaw(frozen)["dataset"]["parts"] == []
    restore(frozen, item, None, None)
    item.parts.append(2)
    assert thaw(frozen)["dataset"]["parts"] == []


def test_nobody_with_a_state_costs_nothing() -> None:
    assert capture([1], iter([1]), as_they_are) is None
    states = WorkerStates(2, stream=False)
    states.delivered(Made(None, Work(), 0))
    assert states.state() is None
    assert states.resume(1) is None


def of(workers: int, make: Callable[[int], Any], *, stream: bool) -> Any:
    states = WorkerStates(workers, stream=stream)
    for number in range(workers):
        states.delivered(Made(None, Work(), 0, number, capture(make(number), None, None)))
    return states.state()


def moved(number: int) -> CountingMap:
    dataset = CountingMap(9)
    for index in range(number):
        dataset[index]
    return dataset


def test_another_number_of_workers() -> None:
    same = of(3, lambda number: moved(1), stream=False)
    states = WorkerStates(2, stream=False)
    states.load(same)
    assert states.state() == same
    fresh = CountingMap(9)
    restore(states.resume(1), fresh, None, None)
    assert fresh.served == 1
    with pytest.raises(LayoutError, match="3 workers and the loader has 2"):
        WorkerStates(2, stream=False).load(of(3, moved, stream=False))
    with pytest.raises(AssertionError):
        WorkerStates(2, stream=True).load(of(3, lambda number: moved(1), stream=True))
    with pytest.raises(StateError, match="num_workers"):
        WorkerStates(3, stream=True).load(of(4, lambda number: moved(1), stream=True))
    WorkerStates(2, stream=True).load(WorkerStates(3, stream=True).state())  # nothing was had
    WorkerStates(0, stream=True).load(of(1, moved, stream=True))  # the same share


@pytest.mark.parametrize(
    "damage",
    [
        {"workers": {}},
        {"workers": {"0": {"since": []}, "2": {"since": []}}},
        {"workers": {"0": {"since": [-1]}, "1": {"since": []}}},
        {"workers": {"0": {"since": [True]}, "1": {"since": []}}},
        {"workers": {"0": 3, "1": {"since": []}}},
        {"workers": {"0": {"since": [], "snapshot": 3}, "1": {"since": []}}},
        {"num_workers": "2"},
        {"num_workers": -2},
        {"next": 2},
        {"next": None},
    ],
)
def test_damaged_states_are_refused(damage: Any) -> None:
    states = WorkerStates(2, stream=True)
    good = of(2, moved, stream=True)
    before = states.state()
    with pytest.raises(StateError):
        states.load({**good, **damage})
    assert states.state() == before
    states.load(good)


def test_a_state_needs_somebody_to_load_it() -> None:
    frozen = capture(CountingMap(3), None, None)
    with pytest.raises(StateError, match="list has no load_state_dict"):
        restore(frozen, [1, 2], None, None)


def test_data_sets_with_a_place_of_their_own_are_left_alone() -> None:
    from penstock import RankDataset

    assert has_state(CountingMap(3))
    assert not hasattr(RankDataset, "start_pass") or not has_state(RankDataset.__new__(RankDataset))


def test_passes_leave_a_trace_only_with_a_state() -> None:
    plain = Trail()
    for _ in range(3):
        plain.begin()
        plain.step(None)
    assert plain.since == [1]
    trail = Trail(b"")
    trail.begin()
    trail.begin()
    assert trail.since == []
    trail.step(None)
    trail.begin()
    trail.begin()
    assert trail.since == [1, 0]
    trail.step(b"x")
    assert (trail.snapshot, trail.since) == (b"x", [0])
    trail.begin()
    assert trail.since == [0, 0]


def test_generators_come_back() -> None:
    random.gauss(0, 1)
    np.random.standard_normal()
    state = json.loads(json.dumps(generator_states()))
    draw = lambda: (random.gauss(0, 1), random.random(), np.random.standard_normal(), torch.rand(3).tolist())  # noqa: E731
    first = draw()
    assert draw() != first
    set_generators(state)
    assert draw() == first
    for damage in ({"python": [3, "AAAA", None]}, {"numpy": [1]}, {"torch": "%"}, {"torch": "AAAA"}, {"python": None}):
        with pytest.raises(StateError, match="generator"):
            set_generators(damage)
    set_generators(state)


def test_generators_of_a_worker_are_part_of_its_snapshot() -> None:
    frozen = capture(CountingMap(3), None, None, generators=True)
    expected = random.random(), torch.rand(()).item()
    random.random()
    restore(frozen, CountingMap(3), None, None)
    assert (random.random(), torch.rand(()).item()) == expected
    assert capture([1], None, None, generators=True) is None
