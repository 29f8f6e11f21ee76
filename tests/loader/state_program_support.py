"""Programs over users' objects with states: what a loader is made of, how its epochs go, and where it stops.

`whole` is the run that never stopped; `continued` goes on from each of its states in new objects. Both must agree.
"""

from __future__ import annotations

import json
import pickle
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loader_support import Squares, ended, plain
from state_support import (
    BothStream,
    CountingCollate,
    CountingMap,
    FailingStream,
    Items,
    IteratorSampler,
    IteratorStream,
    PlainStream,
    StatefulBatches,
    StatefulSampler,
    StatefulStream,
    as_they_are,
    share,
)
from torch.utils.data import IterableDataset

import penstock as ps

N = 13


class NoisyItems(Items):
    """An iterator with a state, that draws from the generator of its data set."""

    def __init__(self, dataset: Noisy) -> None:
        super().__init__(share(dataset.n))
        self.dataset = dataset

    def __next__(self) -> Any:
        return super().__next__(), self.dataset.noise.random()


class Noisy(IterableDataset[Any]):
    """The iterator has the place, and the data set a generator. States are tuples, in part."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.noise = random.Random(3)

    def __iter__(self) -> Iterator[Any]:
        return NoisyItems(self)

    def state_dict(self) -> Any:
        return {"noise": self.noise.getstate()}

    def load_state_dict(self, state: Any) -> None:
        version, words, gauss = state["noise"]
        self.noise.setstate((version, tuple(words), gauss))


class Delegating(IterableDataset[Any]):
    """Asks its iterator for its state, and begins the next iterator at the one that it is given."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.items: Any = None
        self.start = 0

    def __iter__(self) -> Iterator[Any]:
        self.items = Items(share(self.n))
        self.items.place, self.start = self.start, 0
        return self.items  # type: ignore[no-any-return]

    def state_dict(self) -> Any:
        return {"place": self.start if self.items is None else self.items.place}

    def load_state_dict(self, state: Any) -> None:
        self.start = state["place"]


class LargeIterator(IteratorStream):
    """Its iterator has a state of a megabyte."""

    def __iter__(self) -> Iterator[Any]:
        return LargeItems(share(self.n))


class LargeItems(Items):
    def state_dict(self) -> Any:
        return {**super().state_dict(), "buffer": "x" * (1 << 20)}


class LargeState(StatefulStream):
    def state_dict(self) -> Any:
        return {**super().state_dict(), "buffer": "x" * (1 << 18)}


class LargeFailing(FailingStream):
    """Errors among batches that no snapshot is taken after."""

    def state_dict(self) -> Any:
        return {**super().state_dict(), "buffer": "x" * (1 << 18)}


class Breaking(PlainStream):
    """A generator without a state, which an error ends."""

    def __iter__(self) -> Iterator[int]:
        for item in share(self.n):
            if item >= self.n - 3:
                raise LookupError(f"item {item}")
            yield item


class FailingMap(CountingMap):
    """Some of its samples are errors, behind draws."""

    def __getitem__(self, index: int) -> Any:
        item = super().__getitem__(index)
        if index % 7 == 5:
            raise LookupError(f"item {index}")
        return item


class DrawingMap(Squares):
    """Map-style; draws from the global generators, and counts."""

    served = 0

    def __getitem__(self, index: int) -> Any:
        self.served += 1
        return index, self.served, random.random(), float(np.random.rand()), float(torch.rand((), dtype=torch.float64))

    def state_dict(self) -> Any:
        return {"served": self.served}

    def load_state_dict(self, state: Any) -> None:
        self.served = state["served"]


class DrawingCollate(CountingCollate):
    """A collate function with a state that draws from the global generators."""

    def __call__(self, samples: list[Any]) -> Any:
        return super().__call__(samples), random.random()


class Told(PlainStream):
    """Without a state; is told its epochs."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return ((self.epoch, item) for item in share(self.n))


class ToldStateful(StatefulStream):
    """With a state; is told its epochs."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return ((self.epoch, *item) for item in super().__iter__())


STREAMS: dict[str, Callable[[int], Any]] = {
    kind.__name__: kind
    for kind in (
        *(PlainStream, StatefulStream, IteratorStream, BothStream, FailingStream, Breaking, LargeState),
        *(Noisy, Delegating, LargeIterator, LargeFailing),
    )
}
TOLD: dict[str, Callable[[int], Any]] = {"Told": Told, "ToldStateful": ToldStateful}
MAPS: dict[str, Callable[[int], Any]] = {kind.__name__: kind for kind in (Squares, CountingMap, FailingMap)}
SAMPLERS: dict[str, Callable[[int], dict[str, Any]]] = {
    "none": lambda n: {"batch_size": 3},
    "sampler": lambda n: {"batch_size": 3, "sampler": StatefulSampler(n)},
    "iterator": lambda n: {"batch_size": 3, "sampler": IteratorSampler(n)},
    "batches": lambda n: {"batch_sampler": StatefulBatches(n)},
}
COLLATES: dict[str, Callable[[], Any]] = {
    "none": lambda: as_they_are,
    "counting": CountingCollate,
    "drawing": DrawingCollate,
}


@dataclass(frozen=True)
class Program:
    """A loader, and how many batches of each epoch are had: None for all of them.

    ``tells`` is how many epochs the program sets, before or after their ``iter()``; later ones follow by themselves.
    """

    data: str
    sampler: str = "none"
    collate: str = "none"
    epochs: tuple[int | None, ...] = (None, None)
    tells: int = 0
    late: bool = False

    def loader(self, **how: Any) -> ps.DataLoader[Any]:
        """Return a new loader over new objects."""
        options = {**SAMPLERS[self.sampler](N), "collate_fn": COLLATES[self.collate](), **how}
        kinds = {**STREAMS, **MAPS, **TOLD, "DrawingMap": DrawingMap}
        return ps.DataLoader(kinds[self.data](N), **options)

    def begin(self, loader: ps.DataLoader[Any], stack: ExitStack, epoch: int) -> Any:
        """Begin an epoch of a loader, which is told its number if it is one of the first ones."""
        tells = epoch < self.tells
        if tells and not self.late:
            loader.set_epoch(10 + epoch)
        iterator = iterate(loader, stack)
        if tells and self.late:
            loader.set_epoch(10 + epoch)
        return iterator


@dataclass(frozen=True)
class Stop:
    """Where a run may stop: its state, what came after it in the same epoch, and in the epochs behind."""

    epoch: int
    had: int
    over: bool
    state: str
    rest: list[Any]
    later: list[Any]
    limit: int | None
    before: int | None
    """How many batches the run had of the epoch before, if it left that one."""

    @property
    def behind_a_left_epoch(self) -> bool:
        """Whether nothing was had since an epoch was left."""
        return not self.over and not self.had and self.before is not None

    @property
    def asked_for_no_more(self) -> bool:
        """Whether the run left its epoch here."""
        return self.had == self.limit


def next_of(iterator: Iterator[Any]) -> list[Any]:
    """Return a batch in a list, or its error as text; an empty list at the end."""
    try:
        return [plain(next(iterator))]
    except StopIteration:
        return []
    except LookupError as error:
        return [str(error.args[0]).splitlines()[0]]


def epoch_of(iterator: Any, limit: int | None) -> Iterator[Any]:
    """Yield so many batches of an iterator."""
    had = 0
    while (limit is None or had < limit) and (got := next_of(iterator)):
        yield got[0]
        had += 1


def iterate(loader: ps.DataLoader[Any], stack: ExitStack) -> Any:
    """Begin an epoch, whose workers end with the stack unless they persist."""
    iterator = iter(loader)
    return iterator if loader.persistent_workers else stack.enter_context(ended(iterator))


def whole(program: Program, **how: Any) -> list[Stop]:
    """Run a program, and return its states before, at, and behind each of its epochs."""
    loader = program.loader(**how)
    seen: list[list[Any]] = []
    marks = [(0, 0, False, json.dumps(loader.state_dict()))]
    for number, limit in enumerate(program.epochs):
        with ExitStack() as stack:
            iterator = program.begin(loader, stack, number)
            marks.append((number, 0, False, json.dumps(loader.state_dict())))
            seen.append([])
            for batch in epoch_of(iterator, limit):
                seen[-1].append(batch)
                marks.append((number, len(seen[-1]), False, json.dumps(loader.state_dict())))
        if limit is None:
            marks.append((number, len(seen[-1]), True, json.dumps(loader.state_dict())))
    loader.close()
    return [
        Stop(
            *(epoch, had, over, state, seen[epoch][had:], seen[epoch + 1 :]),
            limit=program.epochs[epoch],
            before=program.epochs[epoch - 1] if epoch else None,
        )
        for epoch, had, over, state in marks
    ]


def continued(program: Program, stop: Stop, *, later: bool = True, **how: Any) -> tuple[list[Any], list[Any]]:
    """Go on from a stop in new objects, and return the rest of its epoch, and the later ones."""
    loader = program.loader(**how)
    loader.load_state_dict(json.loads(stop.state))
    if loader.num_workers == json.loads(stop.state).get("workers", {}).get("num_workers"):
        assert json.dumps(loader.state_dict()) == stop.state
    passes: list[list[Any]] = [] if not stop.over else [[]]
    limits = [None if stop.limit is None else stop.limit - stop.had, *program.epochs[stop.epoch + 1 :]][len(passes) :]
    for one in limits if later else limits[: 1 - len(passes)]:
        with ExitStack() as stack:
            passes.append(list(epoch_of(program.begin(loader, stack, stop.epoch + len(passes)), one)))
    loader.close()
    return passes[0], passes[1:]


class FailingCollate(CountingCollate):
    """Fails, when it is armed, in the next call for its state or with one."""

    armed = False

    def state_dict(self) -> Any:
        self._fail()
        return super().state_dict()

    def load_state_dict(self, state: Any) -> None:
        self._fail()
        super().load_state_dict(state)

    def _fail(self) -> None:
        if self.armed:
            self.armed = False
            raise ConnectionError("the network is down")


def row_of(record: ps.Record) -> int:
    return record.row


def slow_row_of(record: ps.Record) -> int:
    """Load a row; some take longer, so that batches overtake each other."""
    time.sleep(0.002 * (record.row % 5 == 0))
    return record.row


class GrowingJob:
    """One rank of a job over a file that grows. It crashes, skips batches, and cannot begin an epoch at times.

    Each batch is one of the epoch of a run that nothing happened to, over the rows with which the epoch began.

    Args:
        path: the file.
        world_size, env: ranks of the job, and changes of the environment. Loaders are made before the rank is known.
        overtaking: two threads with ``in_order=False``, and no state in the collate function, which they would share.
    """

    def __init__(self, path: Path, world_size: int, env: Any, *, overtaking: bool) -> None:
        self.path, self.world_size, self.env, self.overtaking = path, world_size, env, overtaking
        self.rows = self.calls = 0
        self.grow(17)
        self.make(thread=False)
        self.begin_epoch(0)

    def grow(self, rows: int) -> None:
        """Append rows to the file."""
        with self.path.open("a") as file:
            file.writelines(f"{row:03}.jpg {row}\n" for row in range(self.rows, self.rows + rows))
        self.rows += rows

    def make(self, *, thread: bool) -> None:
        """Make the loader."""
        self.env.delenv("RANK", raising=False)
        self.env.setenv("WORLD_SIZE", str(self.world_size))
        load = slow_row_of if self.overtaking else row_of
        dataset = pickle.loads(pickle.dumps(ps.RankDataset(self.path, seed=3, load=load)))
        self.collate = FailingCollate()
        how: dict[str, Any] = {"executor": "thread", "num_workers": 1} if thread else {}
        if self.overtaking:
            how = {"executor": "thread", "num_workers": 2, "in_order": False}
        self.loader = ps.DataLoader(dataset, 2, collate_fn=as_they_are if self.overtaking else self.collate, **how)
        assert self.loader.stats()["split_by"] == "the dataset"
        self.env.setenv("RANK", str(self.world_size - 1))
        self.iterator: Any = None

    def begin_epoch(self, epoch: int) -> None:
        """Note the batches of an epoch that begins now."""
        whole = ps.DataLoader(ps.RankDataset(self.path, seed=3, load=row_of), 2, collate_fn=as_they_are)
        whole.set_epoch(epoch)
        self.epoch, self.left, self.grown = epoch, list(whole), False

    def take(self, count: int) -> None:
        """Have so many batches, or the rest of the epoch."""
        if self.iterator is None:
            self.iterator = iter(self.loader)
        for _ in range(count):
            batch = next(self.iterator, None)
            if batch is None:
                assert self.left == []
                self.iterator = None
                self.begin_epoch(self.epoch + 1)
                return
            if not self.overtaking:
                self.calls += 1
                calls, batch = batch
                assert (calls, batch) == (self.calls, self.left[0])
            self.left.remove(batch)

    def skip(self, count: int) -> None:
        """Leave out batches that were not delivered."""
        self.loader.skip(min(count, len(self.left)))
        self.iterator, self.left = None, self.left[count:]

    def crash(self, rows: int, thread: bool, fails: bool) -> None:
        """Go on from a state in new objects, with rows appended, perhaps after an ``iter()`` that fails."""
        state = json.loads(json.dumps(self.loader.state_dict()))
        self.loader.close()
        self.grow(rows)
        self.grown = self.grown or rows > 0
        self.make(thread=thread)
        self.loader.load_state_dict(state, allow_growth=self.grown)
        assert json.loads(json.dumps(self.loader.state_dict())) == state
        if fails and not self.overtaking:
            self.collate.armed = True
            with pytest.raises(ConnectionError):
                iter(self.loader)
            assert json.loads(json.dumps(self.loader.state_dict())) == state
