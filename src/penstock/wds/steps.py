"""Stages under way: iterators that can say where they are, and be opened there again.

    stages:   [source, split, expand, shuffle, batched]
    steps:    each an iterator over the one before it
    state:    [   4  ,   2  ,  1536 ,  {...} ,  None  ]     one entry for each stage

A step's `Step.state` says what the steps up to it have to be opened with so that it goes on after the item that it gave
last. What a stage holds back (a buffer, a batch half unpacked) is not in it: the stages before it are opened at the
place where the oldest of that came from, and it is made again.

Invariant: a state has numbers and short texts, none of the data, and its size does not depend on how far the stream is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple, TypeVar

from torch.utils.data import DataLoader, IterableDataset

from penstock import distributed
from penstock.distributed import Worker, World
from penstock.errors import ConfigError, StateError
from penstock.order.hashing import derive_key, mix
from penstock.wds.utils import PipelineStage

__all__ = [
    "Context",
    "Counted",
    "Expanded",
    "Replayed",
    "SourceStep",
    "Stage",
    "Step",
    "Through",
    "context_here",
    "memoryless",
    "open_steps",
    "read_count",
]


T = TypeVar("T")


class Context(NamedTuple):
    """What a stage may know: its place in the pipeline, and whose stream this is.

    ``turn`` counts the passes of one stream that goes on over several of them.
    """

    seed: int
    epoch: int
    turn: int
    world: World
    worker: Worker
    place: int = 0

    def key(self, name: str, *, common: bool, seed: int | None = None) -> int:
        """64 bits for random choices.

        Args:
            name: what for.
            common: the same for all ranks and workers.
            seed: instead of the pipeline's.
        """
        key = mix(derive_key(self.seed if seed is None else seed, self.epoch, f"wds {name}"), self.turn, self.place)
        return key if common else mix(key, *self.world, *self.worker)


def context_here() -> Context:
    """For stages that are used by themselves."""
    return Context(0, 0, 0, distributed.current(), distributed.worker())


class Step(Iterator[Any]):
    """A stage under way.

    ``taken``: its items are this worker's own already, so they are not to be split.
    """

    taken = False

    def state(self) -> list[Any]:
        """Where this step and those before it have to be opened, to go on from here."""
        raise NotImplementedError


class Stage(PipelineStage):
    """A stage that can be begun anywhere. Also a function from an iterator to an iterator."""

    def begin(self, source: Step, context: Context, own: Any) -> Step:
        """Begin over ``source``, which stands where the state says; ``own`` is this stage's entry in it, or None."""
        raise NotImplementedError

    def run(self, src: Any = None) -> Iterator[Any]:
        """Turn one iterator into another."""
        return self.begin(SourceStep(src, None), context_here(), None)

    def __call__(self, src: Iterable[Any]) -> Iterator[Any]:
        return self.run(src)

    def invoke(self, *args: Any, **kw: Any) -> Any:
        """The same as `run`."""
        return self.run(*args, **kw)


def memoryless(stage: T) -> T:
    """Declare that a stage of one's own holds nothing between two items that it gives, as ``map`` does.

    Such a stage goes on from a state at once; others are begun at the start of the epoch again, and what they gave is
    made again and dropped.
    """
    stage.memoryless = True  # type: ignore[attr-defined]
    return stage


def open_steps(stages: list[Any], context: Context, state: list[Any] | None) -> Step:
    """The last step of a pipeline, with all before it.

    Raises:
        StateError: a state of another number of stages.
    """
    if state is not None and len(state) != len(stages):
        raise StateError(f"this state is of a pipeline of {len(state)} stages, and this one has {len(stages)}")
    step = _first(stages[0], context, None if state is None else state[0])
    for number, stage in enumerate(stages[1:], 1):
        own = None if state is None else state[number]
        stage = stage.stage() if isinstance(stage, FunctionType) and hasattr(stage, "stage") else stage
        if isinstance(stage, Stage):
            step = stage.begin(step, context._replace(place=number), own)
        elif getattr(stage, "memoryless", False):
            step = Through(step, partial(_apply, stage))
        else:
            step = Replayed(step, stage, own)
    return step


def _first(source: Any, context: Context, own: Any) -> Step:
    if own is None:
        _tell_epoch(source, context)
    begin = getattr(source, "begin_source", None)
    if begin is not None:
        step: Step = begin(context, own)
        return step
    return SourceStep(source, own)


def _tell_epoch(source: Any, context: Context) -> None:
    """Say to a loader of a stream which epoch this pass is: one of which workers have given nothing yet is known by
    nothing else. Later passes of one stream have numbers that no epoch has.
    """
    if isinstance(source, DataLoader) and isinstance(source.dataset, IterableDataset):
        teller: Any = source if hasattr(source, "set_epoch") else source.dataset
        if hasattr(source.dataset, "set_epoch"):
            teller.set_epoch(mix(context.epoch, context.turn) >> 2 if context.turn else context.epoch)


def _apply(stage: Any, src: Iterator[Any]) -> Iterator[Any]:
    return iter(stage.run(src) if hasattr(stage, "run") else stage(src))


def read_count(own: Any) -> int:
    """A count from a state; 0 for none. Raises StateError for anything else."""
    if own is None:
        return 0
    if type(own) is not int or not 0 <= own < 1 << 62:
        raise StateError(f"this state is damaged: {own!r} where a count belongs")
    return own


def _items(source: Any) -> Iterator[Any]:
    if hasattr(source, "__iter__") or hasattr(source, "__getitem__"):
        return iter(source)
    if isinstance(source, PipelineStage):
        return iter(source.run())
    if callable(source):
        return iter(source())
    raise ConfigError(f"{source!r}: not a valid pipeline stage")


def _go_on(step: Step, count: int) -> None:
    """Drop the items that were had. Raises StateError if there are not so many."""
    for had in range(count):
        try:
            next(step)
        except StopIteration:
            raise StateError(
                f"a stage had given {count} items when this state was taken, and now it has {had}: the data are others"
            ) from None


class SourceStep(Step):
    """Any iterable as a first stage; one with a state goes on from that, of others what was had is dropped."""

    def __init__(self, source: Any, own: Any) -> None:
        self._source = source
        self._stateful = hasattr(source, "state_dict") and hasattr(source, "load_state_dict")
        skip = 0
        if self._stateful and own is not None:
            source.load_state_dict(own)
        elif not self._stateful:
            skip = read_count(own)
        self._items = _items(source)
        self._had = 0
        _go_on(self, skip)

    def __next__(self) -> Any:
        item = next(self._items)
        self._had += 1
        return item

    def state(self) -> list[Any]:
        return [self._source.state_dict() if self._stateful else self._had]


class Through(Step):
    """A stage that holds nothing between two items that it gives."""

    def __init__(self, source: Step, function: Callable[[Step], Iterator[Any]]) -> None:
        self._source = source
        self._items = iter(function(source))
        self._next = self._items.__next__

    def __next__(self) -> Any:
        return self._next()

    def state(self) -> list[Any]:
        return [*self._source.state(), None]


class Counted(Step):
    """A stage whose only memory is a count: ``function(source, count)`` gives pairs of the count and an item."""

    def __init__(self, source: Step, function: Callable[[Step, int], Iterator[tuple[int, Any]]], own: Any) -> None:
        self._source = source
        self._count = read_count(own)
        self._items = function(source, self._count)

    def __next__(self) -> Any:
        self._count, item = next(self._items)
        return item

    def state(self) -> list[Any]:
        return [*self._source.state(), self._count]


class Expanded(Step):
    """A stage that makes several items of each that it gets: ``function(item, position)`` gives pairs of a position
    and an item, and begins behind a position if that is not None.
    """

    def __init__(self, source: Step, function: Callable[[Any, Any], Iterator[tuple[Any, Any]]], own: Any) -> None:
        self._source = source
        self._function = function
        position = None if own is None else read_count(own)
        self._before: list[Any] | None = None if own is None else source.state()
        self._position: Any = position
        self._current: Iterator[tuple[Any, Any]] = iter(())
        self._seek: Any = position

    def __next__(self) -> Any:
        # No generator of its own: one that holds this object would keep files open until the next garbage collection.
        while True:
            for self._position, item in self._current:  # noqa: B020
                return item
            self._before = None
            before = self._source.state()
            item = next(self._source)
            self._current = self._function(item, self._seek)
            self._before, self._position, self._seek = before, self._seek, None

    def state(self) -> list[Any]:
        if self._before is None:
            return [*self._source.state(), None]
        return [*self._before, self._position]


class Replayed(Step):
    """A stage of which nothing is known: it is begun where it was begun, and what it gave is dropped."""

    def __init__(self, source: Step, stage: Any, own: Any) -> None:
        self._origin = source.state()
        self._items = _apply(stage, source)
        self._had = 0
        _go_on(self, read_count(own))

    def __next__(self) -> Any:
        item = next(self._items)
        self._had += 1
        return item

    def state(self) -> list[Any]:
        return [*self._origin, self._had]
