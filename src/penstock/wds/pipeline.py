"""`DataPipeline`: a source and stages over it, with epochs and a cursor. `Step`: a running stage, a stream.

    pipeline = DataPipeline(SimpleShardList(urls), split_by_worker, tarfile_to_samples(), shuffle(1000), decode("rgb8"))
    for sample in pipeline: ...

    state = pipeline.state_dict()         at any sample
    pipeline.load_state_dict(state)       in another process: the next iteration continues after that sample

A step is a stream over the step before it, and can be opened at any position::

    stages:   [source, split, expand, shuffle, batched]
    cursor:   [   4  ,   2  ,  1536 ,  {...} ,  None  ]     one entry for each stage

`Step.cursor` says where to open the steps up to this one, so that it continues after the last item that it returned. A
cursor does not hold the items that a stage has buffered (a shuffle buffer, a partly split batch): the stages before it
are opened at the oldest buffered item, and compute the buffered items again.

Invariants: the items are a function of (stages, seed, epoch, rank, worker); the state counts the delivered items. A
cursor holds numbers and short strings, no data. Its size does not depend on the position.
"""

from __future__ import annotations

import operator
import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType, TracebackType
from typing import Any, NamedTuple, Self, TypeVar

from torch.utils.data import IterableDataset

from penstock import distributed
from penstock.distributed import Worker, World
from penstock.errors import ConfigError, StateError, escaped
from penstock.hashing import derive_key, mix
from penstock.order import ORDER_VERSION
from penstock.plan.cursor import State, check_state, read_int
from penstock.plan.epoch_stream import EpochDataset, EpochStream
from penstock.plan.source_stream import SourceStream, check_pass, drop, keeps_position, loads_stream
from penstock.plan.stream import ResumableDataset, Stream, StreamStart
from penstock.wds import utils
from penstock.wds.utils import KINDS, PipelineStage, allow, allowed

T = TypeVar("T")

_ENDLESS = -1


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


class FirstStage(IterableDataset[Any], PipelineStage):
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
        source: a `FirstStage`; a resumable dataset, which gets a new stream in the context's epoch; or any iterable. An
            iterable with a state resumes from it; of others, the items before the position are dropped.
        context: seed, epoch, rank and worker of the stream.
        own: the source's entry in a cursor; None for the beginning.

    Raises:
        ConfigError: the source is not iterable.
        StateError: the entry does not fit the source.
    """
    if isinstance(source, FirstStage):
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
    """A stage whose only state is a count: ``function(source, count)`` yields pairs of the new count and an item.

    The first stage has no ``source``.
    """

    def __init__(
        self, source: Step | None, function: Callable[[Any, int], Iterator[tuple[int, Any]]], own: Any
    ) -> None:
        self._source = source
        self._count = read_count(own)
        self._items = function(source, self._count)

    def __next__(self) -> Any:
        self._count, item = next(self._items)
        return item

    def cursor(self) -> list[Any]:
        return [*([] if self._source is None else self._source.cursor()), self._count]


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


class _Passes(NamedTuple):
    """How often a stream reads its source.

    ``context`` belongs to the stream's first pass. ``limit``: items per epoch, or None. ``starves``: whether a pass
    without items is an error, rather than a worker without shards.
    """

    stages: list[Any]
    context: Context
    repetitions: int
    limit: int | None
    starves: bool


class _PipelineStream(EpochStream):
    """One epoch of a pipeline, from a cursor on.

    It does not refer to the pipeline, which refers to it: the cycle would keep files open until garbage collection.
    """

    def __init__(self, passes: _Passes, cursor: State) -> None:
        super().__init__(int(cursor["epoch"]))
        self._passes = passes
        # Where to open the stages next; the items delivered in this epoch are counted separately.
        self._cursor = cursor
        self._had = int(cursor["had"])
        self._step: Step | None = None
        # The items delivered before this pass; unknown for a resumed pass, which therefore counts as one with items.
        self._before = self._had if cursor["steps"] is None else -1
        self._pid = os.getpid()

    def next_item(self) -> Any:
        limit = self._passes.limit
        while limit is None or self._had < limit:
            step = self._step or self._open()
            try:
                item = next(step)
            except StopIteration:
                self._end_pass()
                continue
            self._had += 1
            return item
        raise StopIteration

    def _open(self) -> Step:
        """Start or resume a pass. Raises StopIteration after the last one."""
        cursor, passes = self._cursor, self._passes
        if 0 < passes.repetitions <= cursor["turn"]:
            raise StopIteration
        if "source" in cursor:
            passes.stages[0].load_state_dict(cursor["source"])
        context = passes.context._replace(turn=int(cursor["turn"]))
        try:
            self._step = open_steps(passes.stages, context, cursor["steps"])
        except StopIteration as stop:
            # Such as ``first = next(source)`` in a stage, over a source without items.
            raise escaped(stop) from stop
        return self._step

    def _end_pass(self) -> None:
        """Prepare the next pass. Raises StopIteration if there is none, ConfigError if passes yield no items."""
        turn, barren = int(self._cursor["turn"]) + 1, self._had == self._before
        self._step, self._before = None, self._had
        self._cursor = {**self._cursor, "turn": turn, "steps": None}
        self._cursor.pop("source", None)
        if barren and turn != self._passes.repetitions:
            if self._passes.starves:
                raise ConfigError("the pipeline is repeated to fill an epoch, but its source yields no samples")
            raise StopIteration

    def cursor(self) -> State:
        cursor: State = {**self._cursor, "had": self._had}
        if self._step is not None:
            cursor["steps"] = self._step.cursor()
            cursor.pop("source", None)
        return cursor

    # The next epoch, if it continues this stream.

    def runs(self, stages: list[Any]) -> bool:
        """Return whether the stream consists of these stages and can continue in this process."""
        begun, own = self._step is not None or self._cursor["steps"] is not None, self._passes.stages
        same = len(own) == len(stages) and all(map(operator.is_, own, stages))
        return begun and same and not self.failed and self._pid == os.getpid()

    def next_cursor(self, begun: State) -> State:
        """Return the cursor of the next epoch, which continues this one. ``begun``: its identity and number."""
        return {**self.cursor(), **begun, "had": 0}

    def following(self, begun: State, limit: int | None) -> _PipelineStream:
        """Return the stream of the next epoch, of ``limit`` items. It takes over the running stages and ends this
        stream.
        """
        stream = _PipelineStream(self._passes._replace(limit=limit), {**self._cursor, **begun, "had": 0})
        stream._step, stream._before = self._step, self._before - self._had
        self._cursor = self.cursor()
        self._step, self.over = None, True
        return stream


class DataPipeline(EpochDataset, PipelineStage):
    """A pipeline of stages.

    Args:
        stages: the first one is the source: an iterable, a dataset, a loader, or a function without arguments that
            returns an iterable. The others are functions from an iterator to an iterator, or have ``run(src)``. None
            is skipped, lists are flattened.
        seed: seed of shuffles and other draws, which are functions of it and the epoch.

    Raises:
        ConfigError: an argument is not a stage, or there is no stage.

    Every iteration is the next epoch, unless `set_epoch` chooses another; in worker processes too, persistent or not.
    Built-in stages (`map`, `decode`, `to_tuple`, `batched`, ...) and shuffles resume from a state directly, and read at
    most the items of a shuffle buffer again. Custom stages run again from the start of the epoch, unless they are
    declared `memoryless`.
    """

    def __init__(self, *stages: Any, seed: int | None = None) -> None:
        super().__init__()
        self.pipeline = _flat(stages)
        self.seed = 0 if seed is None else seed
        derive_key(self.seed)
        self.repetitions = 1
        self.nsamples = _ENDLESS
        self._per_rank = False
        self._length: int | None = None

    # Stages.

    def stage(self, i: int) -> Any:
        """Return stage number ``i``."""
        return self.pipeline[i]

    def append(self, f: Any) -> None:
        """Add a stage to this pipeline."""
        self.pipeline.append(f)

    def compose(self, *args: Any) -> Self:
        """Return a pipeline with more stages."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        new.pipeline = [*self.pipeline, *_flat(args)]
        new._forget()
        return new

    def with_epoch(self, nsamples: int = -1, nbatches: int = -1, *, per: str = "worker") -> Self:
        """Return a pipeline with epochs of exactly this many items, from the next epoch on.

        The epochs continue one stream, which repeats its source as often as needed.

        Args:
            nsamples, nbatches: the number of items of this pipeline, samples or batches; the larger one is used.
            per: ``"worker"``: each worker yields this many (a loader's own pipeline has one worker); ``"rank"``: the
                workers of a rank yield this many together.

        Raises:
            ConfigError: an invalid number.

        The stream starts again, in another order, after `set_epoch` and `append`, if workers are not persistent, and if
        this pipeline is the source of another pipeline or of a mix.
        """
        count = max(nsamples, nbatches)
        if count < 1 or per not in ("worker", "rank"):
            raise ConfigError(f"with_epoch takes a positive number and per='worker' or 'rank', got {count} and {per!r}")
        self.repetitions, self.nsamples, self._per_rank = _ENDLESS, count, per == "rank"
        return self

    def repeat(self, nepochs: int = -1, nbatches: int = -1) -> Self:
        """Return a pipeline that reads its source ``nepochs`` times per iteration, or yields ``nbatches`` items."""
        self.repetitions = nepochs if nepochs > 0 else _ENDLESS
        self.nsamples, self._per_rank = (nbatches if nbatches > 0 else _ENDLESS), False
        return self

    def with_length(self, n: int, silent: bool = False) -> Self:
        """Return a pipeline whose ``len`` is ``n``. Nothing else changes."""
        self._length = n
        return self

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(
                f"object of type '{type(self).__name__}' has no len(): a stream of shards does not know the "
                "number of its samples. Set it with with_length(n), or use penstock.ShardDataset, which counts samples"
            )
        return self._length

    def __bool__(self) -> bool:
        return True

    # Iteration.

    def _choose(self, epoch: int) -> None:
        if self.pipeline:
            choose_epoch(self.pipeline[0], epoch)

    def open_behind(self, last: Stream | None, opening: StreamStart) -> Stream:
        """Return the stream of a loader's epoch.

        It continues the last stream, unless `set_epoch` chose the epoch; then the source gets that epoch.
        """
        goes_on = opening.stream is None and not opening.chosen
        if goes_on and (stream := self._alive(last)) is not None:
            return stream.following(self._begun(opening.epoch), self._limit())
        return super().open_behind(last, opening)

    def __iter__(self) -> Stream:
        stream = self._ending
        if stream is None or self._loaded is not None:
            return super().__iter__()
        self._stream = stream.following(self._begun(self._epochs.next), self._limit())
        self._epochs.begin(self._stream.epoch)
        return self._stream

    @property
    def _ending(self) -> _PipelineStream | None:
        """Return the last stream, if the next epoch continues it."""
        return self._alive(self._stream) if self._times_set_at_start == self._epochs.times_set else None

    def _alive(self, last: Stream | None) -> _PipelineStream | None:
        """Return ``last`` as a pipeline's stream, if the next epoch continues it."""
        goes_on = self.repetitions == _ENDLESS and self.nsamples > 0
        return last if goes_on and isinstance(last, _PipelineStream) and last.runs(self.pipeline) else None

    def _begun(self, epoch: int) -> State:
        return {**self._identity(), "epoch": epoch}

    def _limit(self) -> int | None:
        """Return the number of items of an epoch in this worker; None without `with_epoch`."""
        if not self._per_rank:
            return None if self.nsamples < 0 else self.nsamples
        worker = distributed.worker()
        return self.nsamples // worker.total + (worker.id < self.nsamples % worker.total)

    def iterator(self) -> Stream:
        """Return ``iter(self)``."""
        return iter(self)

    # The protocol of resumable datasets.

    def first_cursor(self, epoch: int) -> State:
        """Return the cursor of an epoch's beginning, in a new stream."""
        return {**self._identity(), "where": None, "origin": epoch, "epoch": epoch, "turn": 0, "had": 0, "steps": None}

    def check_cursor(self, cursor: Mapping[str, Any]) -> None:
        """Check that a cursor belongs to this pipeline, rank and worker.

        Raises:
            StateError: it does not, or it is damaged.
        """
        check_state(cursor, self._identity(), of="pipeline")
        for name in ("origin", "epoch", "turn", "had"):
            read_int(cursor, name, of="pipeline")
        steps = cursor.get("steps", 0)
        if steps is not None and not (isinstance(steps, list) and len(steps) == len(self.pipeline)):
            raise StateError(f"the state of this pipeline is damaged: steps is {cursor.get('steps')!r}")
        if "source" in cursor and not (self.pipeline and keeps_position(self.pipeline[0])):
            raise StateError(
                "this state holds a state of the pipeline's source, but the source has no state here: resume with "
                "the same source, or start again without the state"
            )
        if steps is not None or cursor["turn"]:  # a stream that has not started fits every rank and worker
            check_state(cursor, {"where": self._where()}, of="pipeline")

    def _identity(self) -> State:
        return {
            "order_version": ORDER_VERSION,
            "seed": self.seed,
            "stages": len(self.pipeline),
            "items": [self.repetitions, self.nsamples, self._per_rank],
        }

    def open_at(self, cursor: State) -> Stream:
        """Return a stream from a checked cursor."""
        if not self.pipeline:
            raise ConfigError("a pipeline needs a source")
        for stage in self.pipeline[1:]:
            if not callable(stage) and not hasattr(stage, "run"):
                raise ConfigError(f"{stage!r}: not a valid pipeline stage")
        worker = distributed.worker()
        context = Context(self.seed, int(cursor["origin"]), 0, self._world.get(), worker)
        starves = self._per_rank or worker.total == 1
        passes = _Passes([*self.pipeline], context, self.repetitions, self._limit(), starves)
        return _PipelineStream(passes, {**cursor, "where": self._where()})

    def _last_cursor(self) -> State:
        """Return the cursor of this process's most recent iterator: numbers and short strings, no data.

        After an error, the cursor is after the failed sample or batch, like a loader's; if a shuffle had not received
        that sample yet, the cursor is at the sample.
        """
        state = super()._last_cursor()
        if self._loaded is not None or self._running is not None or self._stream is None:
            return state
        if self._ending is not None:
            return self._ending.next_cursor(self._begun(self._epochs.next))
        if keeps_position(self.pipeline[0]):
            state["source"] = self.pipeline[0].state_dict()
        return state

    def __getstate__(self) -> dict[str, Any]:
        kinds = [kind for kind in KINDS if allowed(kind)]
        return {**super().__getstate__(), "_permissions": kinds, "_secure": utils.enforce_security}

    def __setstate__(self, state: dict[str, Any]) -> None:
        allow(*state.pop("_permissions", ()))
        utils.enforce_security = state.pop("_secure", False) or utils.enforce_security
        self.__dict__.update(state)

    # Closing.

    def close(self) -> None:
        """Drop the running iteration, close its files, and close stages that have ``close``. Idempotent."""
        self._stream = None
        for stage in self.pipeline:
            close: Callable[[], object] | None = getattr(stage, "close", None)
            if close is not None:
                close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _flat(stages: Iterable[Any]) -> list[Any]:
    """Return the stages, without None, and with those in lists."""
    lists = (stage if isinstance(stage, list) else [stage] for stage in stages if stage is not None)
    return [stage for some in lists for stage in some]
