"""Steps: the running stages of a pipeline, each a stream over the one before, reopened at any position.

    stages:   [source, split, expand, shuffle, batched]
    steps:    each a stream over the one before it
    cursor:   [   4  ,   2  ,  1536 ,  {...} ,  None  ]     one entry for each stage

`Step.cursor` says where to open the steps up to this one, so that it continues after the last item that it returned. A
cursor does not hold the items that a stage has buffered (a shuffle buffer, a partly split batch): the stages before it
are opened at the oldest buffered item, and compute the buffered items again.

Invariant: a cursor holds numbers and short strings, no data. Its size does not depend on the position.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
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

T = TypeVar("T")


class Context(NamedTuple):
    """The values that a stage may depend on: seed, epoch, rank, worker, and its number in the pipeline.

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
        """The epoch for a source dataset. Repeated passes of one stream get numbers that no epoch has."""
        return mix(self.epoch, self.turn) >> 2 if self.turn else self.epoch

    def key(self, name: str, *, common: bool, seed: int | None = None) -> int:
        """Return a 64-bit key for random choices.

        Args:
            name: what the choices are for.
            common: make the key the same for all ranks and workers.
            seed: replaces the pipeline's seed.
        """
        key = mix(derive_key(self.seed if seed is None else seed, self.epoch, f"wds {name}"), self.turn, self.place)
        return key if common else mix(key, *self.world, *self.worker)


def default_context() -> Context:
    """Return the context of a stage that is used outside a pipeline."""
    return Context(0, 0, 0, distributed.current(), distributed.worker())


class Step(Stream):
    """A running stage.

    ``taken``: its items belong only to this worker already, so they must not be split.
    """

    taken = False

    @abstractmethod
    def cursor(self) -> list[Any]:
        """Return where to open this step and those before it to resume here: one entry per stage."""


class Source(IterableDataset[Any], PipelineStage):
    """A first stage that can be opened at any position."""

    def begin_source(self, context: Context, own: Any) -> Step:
        """Open the source; ``own`` is its entry in a cursor, None for the beginning."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        return self.begin_source(default_context(), None)


class Stage(PipelineStage):
    """A later stage that can be opened at any position. Also a function from an iterator to an iterator."""

    def begin(self, source: Step, context: Context, own: Any) -> Step:
        """Open the stage over ``source``, which is open at the cursor; ``own`` is this stage's entry in it, or None."""
        raise NotImplementedError

    def run(self, src: Any = None) -> Iterator[Any]:
        """Turn one iterator into another."""
        return self.begin(IteratorStep(src), default_context(), None)

    def __call__(self, src: Iterable[Any]) -> Iterator[Any]:
        return self.run(src)

    def invoke(self, *args: Any, **kw: Any) -> Any:
        """Call `run`."""
        return self.run(*args, **kw)


def memoryless(stage: T) -> T:
    """Declare that a custom stage holds nothing between two items, as ``map`` does.

    Such a stage resumes from a state without replaying. Other custom stages start the epoch again, and the items before
    the position are computed and dropped.
    """
    stage.memoryless = True  # type: ignore[attr-defined]
    return stage


def open_steps(stages: list[Any], context: Context, cursor: list[Any] | None) -> Step:
    """Open the stages of a pipeline and return the last step.

    Args:
        stages: the source first.
        context: seed, epoch, rank and worker of the stream.
        cursor: where to open them, one entry per stage; None for the beginning.

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
            step = IteratorStep(_apply(stage, step), step)
        else:
            step = ReplayedStep(step, stage, entries[number])
    return step


def open_source(source: Any, context: Context, own: Any) -> Step:
    """Open the first stage of a pipeline.

    Args:
        source: a `Source`; a resumable dataset, which gets a new stream in the context's epoch; or any iterable. An
            iterable with a state resumes from it; of others, the items before the position are dropped.
        context: seed, epoch, rank and worker of the stream.
        own: the source's entry in a cursor; None for the beginning.

    Raises:
        ConfigError: the source is not iterable.
        StateError: the entry does not fit the source.
    """
    if isinstance(source, Source):
        return source.begin_source(context, own)
    name = f"the source {type(source).__name__}"
    if own is not None:
        check_pass(own, source, name=name, of="pipeline")
    epoch = context.source_epoch if _follows_epoch(source) else None
    return SourceStep(SourceStream(source, name=name, epoch=epoch, cursor=own, iterate=_iterate, warn=False))


def choose_epoch(source: Any, epoch: int) -> None:
    """Set the epoch of a source that counts its epochs itself; all others get it when they are opened."""
    if hasattr(source, "set_epoch") and not _follows_epoch(source):
        source.set_epoch(epoch)


def _follows_epoch(source: Any) -> bool:
    """Return whether a source takes its epoch from the pipeline."""
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
        raise StateError(f"this state is damaged: expected a count, got {own!r}")
    return own


def _apply(stage: Any, src: Iterator[Any]) -> Iterator[Any]:
    return iter(stage.run(src) if hasattr(stage, "run") else stage(src))


class SourceStep(Step):
    """Any iterable as a first stage, opened immediately."""

    def __init__(self, stream: SourceStream) -> None:
        stream.begin()
        self._stream = stream

    def __next__(self) -> Any:
        return next(self._stream)

    def cursor(self) -> list[Any]:
        return [self._stream.cursor()]


class IteratorStep(Step):
    """A plain iterator: of a stage that holds nothing between two items of its ``source``, or else one that cannot be
    reopened, whose cursor records only that it has been started.
    """

    def __init__(self, items: Any, source: Step | None = None) -> None:
        self._next, self._source = _iterate(items).__next__, source

    def __next__(self) -> Any:
        return self._next()

    def cursor(self) -> list[Any]:
        return [True] if self._source is None else [*self._source.cursor(), None]


class CountedStep(Step):
    """A stage whose only state is a count: ``function(source, count)`` yields pairs of the new count and an item."""

    def __init__(self, source: Step, function: Callable[[Step, int], Iterator[tuple[int, Any]]], own: Any) -> None:
        self._source = source
        self._count = read_count(own)
        self._items = function(source, self._count)

    def __next__(self) -> Any:
        self._count, item = next(self._items)
        return item

    def cursor(self) -> list[Any]:
        return [*self._source.cursor(), self._count]


class EndOfStream(Exception):
    """Raised by the function of a `FlatMapStep`: its stream ends here."""


class FlatMapStep(Step):
    """A stage that turns each input into several items.

    ``function(input, position)`` yields pairs of a position and an item, starting after ``position`` unless it is None.
    """

    def __init__(self, source: Step, function: Callable[[Any, Any], Iterator[tuple[Any, Any]]], own: Any) -> None:
        self._source = source
        self._function = function
        position = None if own is None else read_count(own)
        self._before: list[Any] | None = None if own is None else source.cursor()
        self._position: Any = position
        self._current: Iterator[tuple[Any, Any]] = iter(())
        self._seek: Any = position
        self._is_over = False

    def __next__(self) -> Any:
        # Not a generator: it would refer to this object, and the cycle would keep files open until garbage collection.
        while not self._is_over:
            try:
                for self._position, item in self._current:  # noqa: B020
                    return item
            except EndOfStream:
                self._is_over = True
                break
            self._before = None
            before = self._source.cursor()
            item = next(self._source)
            self._current = self._function(item, self._seek)
            self._before, self._position, self._seek = before, self._seek, None
        raise StopIteration

    def cursor(self) -> list[Any]:
        if self._before is None:
            return [*self._source.cursor(), None]
        return [*self._before, self._position]


class ReplayedStep(Step):
    """An unknown stage: it starts again where it first started, and the items before the position are dropped."""

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
