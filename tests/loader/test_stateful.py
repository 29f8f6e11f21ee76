"""The parts of a loader's state that are the user's, without a loader: workers that work ahead, one consumer."""

from __future__ import annotations

import copy
import json
import pickle
import random
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from full_run import examples, full_only
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

import penstock as ps
from penstock.errors import StateError
from penstock.loader.generators import WorkerGenerators
from penstock.loader.messages import BatchMetrics, BatchRequest, BatchResult
from penstock.loader.snapshots import Snapshot, restore, state_before, take_first_snapshot, take_snapshot
from penstock.loader.stateful import LayoutError, WorkerState, WorkerStates
from penstock.loader.stream import StreamFetch
from penstock.plan.user_states import has_state, thaw

STREAMS: dict[str, Callable[[], Any]] = {
    kind.__name__: lambda kind=kind: kind(23)  # type: ignore[misc]
    for kind in (
        *(PlainStream, StatefulStream, IteratorStream, BothStream, HubStream, ChangingStream),
        *(BufferStream, FailingStream, UnevenStream),
    )
}


class Worker:
    """Holds a copy of the data set and makes batches of its items."""

    def __init__(self, dataset: Any, number: int, total: int, size: int, collate_fn: Any) -> None:
        self.dataset, self.number, self.total = dataset, number, total
        self.fetcher = StreamFetch(dataset, collate_fn, batch_size=size, drop_last=False)

    def __enter__(self) -> None:
        from torch.utils.data._utils import worker

        info = SimpleNamespace(id=self.number, num_workers=self.total, seed=0, dataset=self.dataset)
        worker._worker_info = info if self.total else None

    def __exit__(self, *exc: object) -> None:
        from torch.utils.data._utils import worker

        worker._worker_info = None

    def start(self, epoch: int, resume: WorkerState | None) -> Any:
        with self:
            self.fetcher.load_state_dict(resume)
            return self.fetcher.begin(epoch)

    def made(self) -> Any:
        """A `BatchResult`, an error, or None at the end."""
        with self:
            try:
                batch = self.fetcher(BatchRequest([], []), BatchMetrics())
            except StopIteration:
                return None
            except LookupError as error:
                return error
            return BatchResult(batch, BatchMetrics(), 0, self.number, self.fetcher.state_dict())


class Loader:
    """Reads the workers in turn, each some batches ahead."""

    def __init__(
        self, make: Callable[[], Any], workers: int, *, ahead: int = 2, size: int = 3, fresh: bool = False,
        collate: Any = as_they_are,
    ) -> None:  # fmt: skip
        self.pristine, self.collate = make(), collate
        self.workers, self.ahead, self.size, self.fresh = workers, ahead, size, fresh
        self.states = WorkerStates(workers, stream=True)
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
            self.crew = [Worker(d, i, self.workers, self.size, c) for i, (d, c) in enumerate(copies)]
        resumes = [self.states.resume(worker.number) if self.loaded else None for worker in self.crew]
        firsts = [worker.start(self.epoch, resume) for worker, resume in zip(self.crew, resumes, strict=True)]
        consumer = self.states.consumer()
        first_states = {number: first for number, first in enumerate(firsts) if first is not None}
        self.loaded = False
        ready: list[deque[Any]] = [deque() for _ in range(total)]
        alive, turn = [True] * total, self.states.next
        while any(alive):
            for worker in self.crew:
                while len(ready[worker.number]) <= self.ahead:
                    ready[worker.number].append(worker.made())
            if alive[turn]:
                made = ready[turn].popleft()
                if made is not None:
                    consumer.begun(first_states)
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
        self.states.finish(fresh=self.fresh)


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


@full_only("as the same objects", but=["StatefulStream", "0-same objects", "1-fresh workers", "BufferStream-1"])
@pytest.mark.parametrize("fresh", [False, True], ids=["same objects", "fresh workers"])
@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("name", STREAMS)
def test_every_kind_of_stream_goes_on(name: str, workers: int, fresh: bool) -> None:
    check(lambda: Loader(STREAMS[name], workers, fresh=fresh))


@full_only("many starts of workers")
@given(
    name=st.sampled_from(sorted(STREAMS)),
    workers=st.integers(0, 4),
    ahead=st.integers(0, 5),
    size=st.integers(1, 25),
    fresh=st.booleans(),
)
@settings(max_examples=examples(10, 20))
def test_ahead_and_batch_size_change_nothing(name: str, workers: int, ahead: int, size: int, fresh: bool) -> None:
    check(lambda: Loader(STREAMS[name], workers, ahead=ahead, size=size, fresh=fresh))


def test_collate_functions_have_a_state_too() -> None:
    check(lambda: Loader(lambda: PlainStream(23), 2, collate=CountingCollate(), fresh=True))
    check(lambda: Loader(lambda: StatefulStream(23), 2, collate=CountingCollate()))


def test_large_states_are_taken_less_often() -> None:
    fetcher = StreamFetch(BufferStream(100), as_they_are, batch_size=1, drop_last=False)
    fetcher.begin(None)
    taken = []
    for _ in range(40):
        fetcher(BatchRequest([], []), BatchMetrics())
        taken.append(fetcher.state_dict() is not None)
    assert [number for number, yes in enumerate(taken) if yes] == [0, 17, 34]


def test_a_state_never_changes_again() -> None:
    dataset = TensorMap(4)
    frozen = take_snapshot(dataset, None, as_they_are)
    assert frozen is not None
    states = WorkerStates(1, stream=False)
    states.delivered(BatchResult(None, BatchMetrics(), 0, 0, frozen))
    first = states.state()
    assert first is not None
    dataset[2]
    assert thaw(frozen.states)["dataset"]["seen"].tolist() == [0] * 4
    first["workers"]["0"]["snapshot"]["dataset"]["seen"] += 9
    again = states.state()
    assert again is not None
    assert again["workers"]["0"]["snapshot"]["dataset"]["nested"]["list"][0].tolist() == [0] * 4
    states.load(again)
    again["workers"]["0"]["snapshot"]["dataset"]["seen"] += 9
    fresh = TensorMap(4)
    restore(states.resume(0).snapshot, dataset=fresh)  # type: ignore[union-attr]
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
    frozen = take_snapshot(item, None, None)
    item.parts.append(1)
    assert frozen is not None
    assert isinstance(frozen.states, dict)
    assert thaw(frozen.states)["dataset"]["parts"] == []
    restore(frozen, dataset=item)
    item.parts.append(2)
    assert thaw(frozen.states)["dataset"]["parts"] == []


def test_nobody_with_a_state_costs_nothing() -> None:
    assert take_snapshot([1], iter([1]), as_they_are) is None
    states = WorkerStates(2, stream=False)
    states.delivered(BatchResult(None, BatchMetrics(), 0))
    assert states.state() is None
    assert states.resume(1) is None


def test_workers_that_are_new_have_no_seed_of_earlier_ones() -> None:
    states = WorkerStates(2, stream=True)
    states.begin(fresh=True)
    states.base_seed = 7
    states.finish(fresh=False)
    kept = states.state()
    assert kept is not None
    assert kept["base_seed"] == 7
    states.begin(fresh=True)
    new = states.state()
    assert new is not None
    assert "base_seed" not in new


def of(workers: int, make: Callable[[int], Any], *, stream: bool) -> Any:
    states = WorkerStates(workers, stream=stream)
    for number in range(workers):
        states.delivered(BatchResult(None, BatchMetrics(), 0, number, take_snapshot(make(number), None, None)))
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
    restore(states.resume(1).snapshot, dataset=fresh)  # type: ignore[union-attr]
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
    frozen = take_snapshot(CountingMap(3), None, None)
    with pytest.raises(StateError, match="list has no load_state_dict"):
        restore(frozen, dataset=[1, 2])


def test_data_sets_with_a_place_of_their_own_are_left_alone() -> None:
    from penstock import RankDataset

    assert has_state(CountingMap(3))
    assert not hasattr(RankDataset, "start_pass") or not has_state(RankDataset.__new__(RankDataset))


def test_iterators_leave_a_trace_only_with_a_state() -> None:
    plain = WorkerState()
    for _ in range(3):
        plain.delivered(None)
        plain.next_iterator(over=True)
    assert (plain.snapshot, plain.since) == (None, [])
    worker = WorkerState()
    worker.begun(own := Snapshot.of({"dataset": 1}))
    worker.delivered(None)
    worker.record_error()
    worker.next_iterator(over=False)
    worker.next_iterator(over=True)
    assert (worker.snapshot, worker.since, worker.failed) == (own, [2, 1, 0], [1])
    worker.begun(Snapshot.of({"dataset": 2}))  # which may be that of the end of the earlier iterator
    assert worker.snapshot == own
    worker.begun(both := Snapshot.of({"dataset": 2, "iterator": 3}))
    assert (worker.snapshot, worker.since, worker.failed) == (both, [0], [])
    worker.delivered(alone := Snapshot.of({"iterator": 4}))
    assert worker.snapshot == alone
    worker.next_iterator(over=True)
    assert (worker.snapshot, worker.since) == (None, [])


def test_the_state_of_a_collate_function_outlives_the_iterator() -> None:
    worker = WorkerState()
    worker.begun(first := Snapshot.of({"collate_fn": 0}))
    worker.delivered(Snapshot.of({"collate_fn": 1}))
    worker.delivered(last := Snapshot.of({"collate_fn": 2}))
    assert (worker.snapshot, worker.since) == (first, [2])
    read = WorkerState.read(json.loads(json.dumps(worker.state())), of="test")
    for one in (worker, read):
        one.next_iterator(over=True)
        assert (one.snapshot, one.since, one.collate) == (last, [], None)


def test_generators_come_back() -> None:
    generators = WorkerGenerators()
    random.gauss(0, 1)
    np.random.standard_normal()
    torch.randn(1)
    state = json.loads(json.dumps(generators.drawn()))
    draw = lambda: (random.gauss(0, 1), random.random(), np.random.standard_normal(), torch.rand(3).tolist())  # noqa: E731
    first = draw()
    assert draw() != first
    generators.restore(state)
    assert draw() == first
    short = state["python"][-1]
    for damage in (
        {"python": [3, None, "AAAA"]},
        {"numpy": [1]},
        {"torch": ["%"]},
        {"torch": [short]},
        {"python": None},
    ):
        with pytest.raises(StateError, match="generator"):
            generators.restore(damage)
    generators.restore(state)


def test_generators_of_a_worker_are_in_its_snapshot_once_they_were_drawn_from() -> None:
    generators = WorkerGenerators()
    frozen = take_snapshot(CountingMap(3), None, None, generators)
    assert frozen is not None
    assert "generators" not in thaw(frozen.states)
    torch.rand(700)
    frozen = take_snapshot(CountingMap(3), None, None, generators)
    assert frozen is not None
    assert thaw(frozen.states)["generators"].keys() == {"torch"}
    assert len(json.dumps(thaw(frozen.states)["generators"])) < 3_600
    python, expected = random.getstate(), torch.rand(()).item()
    random.random()
    restore(frozen, generators, dataset=CountingMap(3))
    assert (random.getstate(), torch.rand(()).item()) == (python, expected)
    assert take_snapshot([1], None, None, generators) is None


class Wrong(CountingMap):
    def __init__(self, error: Exception) -> None:
        super().__init__(3)
        self.error = error

    def state_dict(self) -> dict[str, Any]:
        raise self.error


def test_a_missing_attribute_before_the_first_item_means_no_state_yet() -> None:
    late = Wrong(AttributeError("place"))
    assert take_first_snapshot(late, None, None) is None
    assert state_before(late) is None
    with pytest.raises(AttributeError, match="place"):
        take_snapshot(late, None, None)


def test_other_errors_before_the_first_item_are_raised() -> None:
    wrong = Wrong(LookupError("no state"))
    for take in (take_first_snapshot, take_snapshot):
        with pytest.raises(LookupError, match="no state"):
            take(wrong, None, None)
    with pytest.raises(LookupError, match="no state"):
        state_before(wrong)


class LambdaStream(PlainStream):
    """A stream whose state cannot leave its worker."""

    def state_dict(self) -> Any:
        return {"next": lambda: 1}

    def load_state_dict(self, state: Any) -> None:
        raise NotImplementedError


def test_a_state_that_cannot_be_pickled_is_an_error_of_its_first_batch() -> None:
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError), match="pickle"):
        list(ps.DataLoader(LambdaStream(4), num_workers=1))


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
class Tells(torch.utils.data.IterableDataset[Any]):
    """Counts its iterators and their items, which tell both."""

    epoch = given = 0

    def __iter__(self) -> Iterator[Any]:
        self.epoch += 1
        return Telling(self)

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.given = state["epoch"], state["given"]


class Telling(Iterator[Any]):
    place = 0

    def __init__(self, dataset: Tells) -> None:
        self.dataset = dataset

    def __next__(self) -> Any:
        if self.place == 6:
            raise StopIteration
        self.place += 1
        self.dataset.given += 1
        return self.dataset.epoch, self.dataset.given

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_set_that_both_its_iterators_and_their_items_move(workers: int) -> None:
    def make() -> ps.DataLoader[Any]:
        return ps.DataLoader(Tells(), 2, collate_fn=list, num_workers=workers)

    loader, again = make(), make()
    iterator = iter(loader)
    assert next(iterator) == [(1, 1), (1, 2)]
    again.load_state_dict(loader.state_dict())
    for rest in (iterator, again):
        assert list(rest) == [[(1, 3), (1, 4)], [(1, 5), (1, 6)]]


def test_a_state_holds_no_beginning_of_an_earlier_pass() -> None:
    """Workers that persist tell where they began passes that were left at once, too."""

    class Passes(StatefulStream):
        def __iter__(self) -> Iterator[Any]:
            self.epochs += 1
            return super().__iter__()

    with ps.DataLoader(Passes(24), 2, num_workers=2, persistent_workers=True) as loader:
        for _ in range(5):
            left = iter(loader)
            del left
        next(iter(loader))
        workers = loader.state_dict()["workers"]["workers"]
        assert [workers[name]["snapshot"]["dataset"]["epochs"] for name in ("0", "1")] == [6, 6]
