"""Stages under way: streams over streams, each of which can be opened again where it is.

    stages:   [source, split, expand, shuffle, batched]
    steps:    each a stream over the one before it
    cursor:   [   4  ,   2  ,  1536 ,  {...} ,  None  ]     one entry for each stage

A step's `Step.cursor` says where the steps up to it have to be opened, so that it goes on behind the item that it gave
last. It has no entry for the items that a stage holds back (a buffer, a batch half unpacked): the stages before it are
opened where the oldest of those came from, and they are made again.

Invariant: a cursor has numbers and short texts, none of the data. Its size does not depend on how far the stream is.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple, TypeVar

from torch.utils.data import IterableDataset

from penstock import distributed
from penstock.distributed import Worker, World
from penstock.errors import ConfigError, StateError
from penstock.hashing import derive_key, mix
from penstock.plan.source_stream import SourceStream, check_pass, drop, loads_stream
from penstock.plan.stream import ResumableDataset, Stream
from penstock.wds.utils import PipelineStage

__all__ = [
    "Context",
    "Counted",
    "Expanded",
    "Given",
    "Replayed",
    "Source",
    "Stage",
    "Step",
    "Through",
    "choose_epoch",
    "context_here",
    "memoryless",
    "open_source",
    "open_steps",
    "read_count",
]


T = TypeVar("T")


class Context(NamedTuple):
    """What a stage may know: its place in the pipeline, and whose stream this is.

    ``turn`` counts the passes over the source in one stream.
    """

    seed: int
    epoch: int
    turn: int
    world: World
    worker: Worker
    place: int = 0

    @property
    def source_epoch(self) -> int:
        """The epoch of a data set that is the source: later passes of a stream have numbers that no epoch has."""
        return mix(self.epoch, self.turn) >> 2 if self.turn else self.epoch

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


class Step(Stream):
    """A stage under way.

    ``taken``: its items are this worker's own already, so they are not to be split.
    """

    taken = False

    @abstractmethod
    def cursor(self) -> list[Any]:
        """Return where this step and those before it have to be opened, to go on from here."""


class Source(IterableDataset[Any], PipelineStage):
    """A first stage that can be begun anywhere."""

    def begin_source(self, context: Context, own: Any) -> Step:
        """Begin; ``own`` is the source's entry in a cursor, or None."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        return self.begin_source(context_here(), None)


class Stage(PipelineStage):
    """A stage that can be begun anywhere. Also a function from an iterator to an iterator."""

    def begin(self, source: Step, context: Context, own: Any) -> Step:
        """Begin over ``source``, which stands where the cursor says; ``own`` is this stage's entry in it, or None."""
        raise NotImplementedError

    def run(self, src: Any = None) -> Iterator[Any]:
        """Turn one iterator into another."""
        return self.begin(Given(src), context_here(), None)

    def __call__(self, src: Iterable[Any]) -> Iterator[Any]:
        return self.run(src)

    def invoke(self, *args: Any, **kw: Any) -> Any:
        """Do the same as `run`."""
        return self.run(*args, **kw)


def memoryless(stage: T) -> T:
    """Declare that a stage of one's own holds nothing between two items that it gives, as ``map`` does.

    Such a stage goes on from a state at once; others are begun at the start of the epoch again, and what they gave is
    made again and dropped.
    """
    stage.memoryless = True  # type: ignore[attr-defined]
    return stage


def open_steps(stages: list[Any], context: Context, cursor: list[Any] | None) -> Step:
    """Return the last step of a pipeline, over all before it.

    Args:
        stages: the source first.
        context: whose stream this is.
        cursor: where to open them, an entry for each stage; None begins anew.

    Raises:
        StateError: the cursor does not fit the data or the stages.
    """
    entries = [None] * len(stages) if cursor is None else cursor
    step = open_source(stages[0], context, entries[0])
    for number, stage in enumerate(stages[1:], 1):
        stage = stage.stage() if isinstance(stage, FunctionType) and hasattr(stage, "stage") else stage
        if isinstance(stage, Stage):
            step = stage.begin(step, context._replace(place=number), entries[number])
        elif getattr(stage, "memoryless", False):
            step = Through(step, partial(_apply, stage))
        else:
            step = Replayed(step, stage, entries[number])
    return step


def open_source(source: Any, context: Context, own: Any) -> Step:
    """Return a first stage under way.

    Args:
        source: one of ours; a data set of ours, which gets a stream of its own in the context's epoch; or anything that
            gives items: with a state it goes on from that, and of others the items that were had are dropped.
        context: whose stream this is.
        own: the source's entry in a cursor; None begins anew.

    Raises:
        ConfigError: it gives no items.
        StateError: the entry does not fit the source.
    """
    if isinstance(source, Source):
        return source.begin_source(context, own)
    name = f"the source {type(source).__name__}"
    if own is not None:
        check_pass(own, source, name=name, of="pipeline")
    epoch = context.source_epoch if _follows_epoch(source) else None
    return Opened(SourceStream(source, name=name, epoch=epoch, cursor=own, iterate=_iterate, warn=False))


def choose_epoch(source: Any, epoch: int) -> None:
    """Say the next epoch to a source that counts its epochs itself; all others are told when they are opened."""
    if hasattr(source, "set_epoch") and not _follows_epoch(source):
        source.set_epoch(epoch)


def _follows_epoch(source: Any) -> bool:
    """Return whether a source is always in the epoch of the pipeline around it."""
    return isinstance(source, ResumableDataset) or loads_stream(source)


def _iterate(source: Any) -> Iterator[Any]:
    if hasattr(source, "__iter__") or hasattr(source, "__getitem__"):
        return iter(source)
    if isinstance(source, PipelineStage):
        return iter(source.run())
    if callable(source):
        return iter(source())
    raise ConfigError(f"{source!r}: not a valid pipeline stage")


def read_count(own: Any) -> int:
    """Return a count from a cursor; 0 for none. Raises StateError for anything else."""
    if own is None:
        return 0
    if type(own) is not int or not 0 <= own < 1 << 62:
        raise StateError(f"this state is damaged: {own!r} where a count belongs")
    return own


def _apply(stage: Any, src: Iterator[Any]) -> Iterator[Any]:
    return iter(stage.run(src) if hasattr(stage, "run") else stage(src))


class Opened(Step):
    """Any iterable as a first stage, opened at once."""

    def __init__(self, stream: SourceStream) -> None:
        stream.begin()
        self._stream = stream

    def __next__(self) -> Any:
        return next(self._stream)

    def cursor(self) -> list[Any]:
        return [self._stream.cursor()]


class Given(Step):
    """Items as they come. They cannot be begun again: the cursor says no more than that they were."""

    def __init__(self, items: Any) -> None:
        self._items = _iterate(items)

    def __next__(self) -> Any:
        return next(self._items)

    def cursor(self) -> list[Any]:
        return [True]


class Through(Step):
    """A stage that holds nothing between two items that it gives."""

    def __init__(self, source: Step, function: Callable[[Step], Iterator[Any]]) -> None:
        self._source = source
        self._items = iter(function(source))
        self._next = self._items.__next__

    def __next__(self) -> Any:
        return self._next()

    def cursor(self) -> list[Any]:
        return [*self._source.cursor(), None]


class Counted(Step):
    """A stage whose only memory is a count: ``function(source, count)`` gives pairs of the count and an item."""

    def __init__(self, source: Step, function: Callable[[Step, int], Iterator[tuple[int, Any]]], own: Any) -> None:
        self._source = source
        self._count = read_count(own)
        self._items = function(source, self._count)

    def __next__(self) -> Any:
        self._count, item = next(self._items)
        return item

    def cursor(self) -> list[Any]:
        return [*self._source.cursor(), self._count]


class Expanded(Step):
    """A stage that makes several items of each that it gets: ``function(item, position)`` gives pairs of a position
    and an item, and begins behind a position if that is not None.
    """

    def __init__(self, source: Step, function: Callable[[Any, Any], Iterator[tuple[Any, Any]]], own: Any) -> None:
        self._source = source
        self._function = function
        position = None if own is None else read_count(own)
        self._before: list[Any] | None = None if own is None else source.cursor()
        self._position: Any = position
        self._current: Iterator[tuple[Any, Any]] = iter(())
        self._seek: Any = position

    def __next__(self) -> Any:
        # No generator of its own: one that holds this object would keep files open until the next garbage collection.
        while True:
            for self._position, item in self._current:  # noqa: B020
                return item
            self._before = None
            before = self._source.cursor()
            item = next(self._source)
            self._current = self._function(item, self._seek)
            self._before, self._position, self._seek = before, self._seek, None

    def cursor(self) -> list[Any]:
        if self._before is None:
            return [*self._source.cursor(), None]
        return [*self._before, self._position]


class Replayed(Step):
    """A stage of which nothing is known: it is begun where it was begun, and what it gave is dropped."""

    def __init__(self, source: Step, stage: Any, own: Any) -> None:
        self._origin = source.cursor()
        self._items = _apply(stage, source)
        self._had = read_count(own)
        drop(self._items, self._had, f"the stage {stage!r}")

    def __next__(self) -> Any:
        item = next(self._items)
        self._had += 1
        return item

    def cursor(self) -> list[Any]:
        return [*self._origin, self._had]
