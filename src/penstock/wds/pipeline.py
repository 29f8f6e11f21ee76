"""`DataPipeline`: a source and stages over it, with epochs and a cursor.

    pipeline = DataPipeline(SimpleShardList(urls), split_by_worker, tarfile_to_samples(), shuffle(1000), decode("rgb8"))
    for sample in pipeline: ...

    state = pipeline.state_dict()         at any sample
    pipeline.load_state_dict(state)       in another process: the next iteration goes on behind that sample

Invariant: the items are a function of (stages, seed, epoch, rank, worker); the state is that of the items that were
handed out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, NamedTuple, Self

from penstock import distributed
from penstock.errors import ConfigError, StateError
from penstock.hashing import derive_key
from penstock.order import ORDER_VERSION
from penstock.plan.cursor import STATE_VERSION, State, check_state, read_int
from penstock.plan.source_stream import keeps_position
from penstock.plan.stream import Stream
from penstock.plan.stream_plan import StreamStart
from penstock.wds import utils
from penstock.wds.iterators import Context, Step, choose_epoch, open_steps
from penstock.wds.stream import EpochDataset, EpochStream
from penstock.wds.trust import KINDS, allow, allowed
from penstock.wds.utils import PipelineStage

__all__ = ["DataPipeline"]

_ENDLESS = -1


class _Passes(NamedTuple):
    """The passes over its source that a stream makes.

    ``context`` is that of the stream's first pass. ``limit``: items of an epoch, or None. ``starves``: whether a pass
    without an item is an error, and not a worker that has no shard.
    """

    stages: list[Any]
    context: Context
    repetitions: int
    limit: int | None
    starves: bool


class _PipelineStream(EpochStream):
    """One epoch of a pipeline, from a cursor on.

    It does not hold the pipeline, which remembers it: files would stay open until the next garbage collection.
    """

    def __init__(self, passes: _Passes, cursor: State) -> None:
        super().__init__(int(cursor["epoch"]))
        self._passes = passes
        # Where the stages are opened next; what was had of the epoch is counted beside it.
        self._cursor = cursor
        self._had = int(cursor["had"])
        self._step: Step | None = None
        # How much was had when the pass began; not known of one that was begun elsewhere, so that counts as fruitful.
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
        """Begin a pass, or go on in it. Raises StopIteration behind the last one."""
        cursor, passes = self._cursor, self._passes
        if 0 < passes.repetitions <= cursor["turn"]:
            raise StopIteration
        if "source" in cursor:
            passes.stages[0].load_state_dict(cursor["source"])
        context = passes.context._replace(turn=int(cursor["turn"]))
        self._step = open_steps(passes.stages, context, cursor["steps"])
        return self._step

    def _end_pass(self) -> None:
        """Have the source begun again. Raises StopIteration if that makes no sense, ConfigError if it never will."""
        turn, barren = int(self._cursor["turn"]) + 1, self._had == self._before
        self._step, self._before = None, self._had
        self._cursor = {**self._cursor, "turn": turn, "steps": None}
        self._cursor.pop("source", None)
        if barren and turn != self._passes.repetitions:
            if self._passes.starves:
                raise ConfigError("the pipeline gave no sample at all, and was to be repeated until there are some")
            raise StopIteration

    def cursor(self) -> State:
        cursor: State = {**self._cursor, "had": self._had}
        if self._step is not None:
            cursor["steps"] = self._step.cursor()
            cursor.pop("source", None)
        return cursor

    # The next epoch of a stream that goes on.

    @property
    def alive(self) -> bool:
        """Whether there is something to go on with, in this process."""
        begun = self._step is not None or self._cursor["steps"] is not None
        return begun and not self.failed and self._pid == os.getpid()

    def next_cursor(self, epoch: int) -> State:
        """Return where the next epoch goes on behind this one."""
        return {**self.cursor(), "epoch": epoch, "had": 0}

    def following(self, epoch: int) -> _PipelineStream:
        """Return the stream of the next epoch. It takes over the stages as they are, and this one is over."""
        stream = _PipelineStream(self._passes, {**self._cursor, "epoch": epoch, "had": 0})
        stream._step, stream._before = self._step, self._before - self._had
        self._cursor = self.cursor()
        self._step, self.over = None, True
        return stream


class DataPipeline(EpochDataset, PipelineStage):
    """A pipeline of stages.

    Args:
        stages: the first one gives items: an iterable, a data set, a loader, or a function without arguments; the
            others are functions from an iterator to an iterator, or have ``run(src)``. None is left out, lists are
            taken as their entries.
        seed: of shuffles and other draws, which follow from it and the epoch.

    Raises:
        ConfigError: no stage, or what is none.

    Every iteration is the next epoch, unless `set_epoch` says which; in worker processes too, whether they are kept or
    not. Stages that give one item after the other (`map`, `decode`, `to_tuple`, `batched`, ...) and shuffles go on from
    a state at once, reading no more again than a shuffle held; stages of your own are run again from the beginning of
    the epoch, unless they are declared `memoryless`.
    """

    def __init__(self, *stages: Any, seed: int | None = None) -> None:
        super().__init__()
        self.pipeline: list[Any] = []
        for stage in stages:
            if stage is not None:
                self.pipeline.extend(stage if isinstance(stage, list) else [stage])
        self.seed = 0 if seed is None else seed
        derive_key(self.seed)
        self.repetitions = 1
        self.nsamples = _ENDLESS
        self._per_rank = False
        self._length: int | None = None
        self._world = distributed.LateWorld(of="pipeline")

    # What it is made of.

    def stage(self, i: int) -> Any:
        """One of the stages."""
        return self.pipeline[i]

    def append(self, f: Any) -> None:
        """Add a stage to this pipeline."""
        self.pipeline.append(f)

    def compose(self, *args: Any) -> Self:
        """Another pipeline, with more stages."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        new.pipeline = [*self.pipeline]
        for stage in args:
            if stage is not None:
                new.pipeline.extend(stage if isinstance(stage, list) else [stage])
        new._forget()
        return new

    def with_epoch(self, nsamples: int = -1, nbatches: int = -1, *, per: str = "worker") -> Self:
        """Epochs of exactly so many items, which the stream goes on over, however often its source has to be begun
        again.

        Args:
            nsamples, nbatches: the larger one counts; items of this pipeline, whatever they are.
            per: ``"worker"``: each worker gives so many (in a loader's own pipeline there is one); ``"rank"``: the
                workers share them out.

        Raises:
            ConfigError: numbers that make no sense.

        The stream begins anew, in another order, after `set_epoch`, where workers end with each epoch, and where this
        pipeline is the source of another one, or of a mix.
        """
        count = max(nsamples, nbatches)
        if count < 1 or per not in ("worker", "rank"):
            raise ConfigError(f"with_epoch takes a positive number, per='worker' or 'rank'; got {count}, {per!r}")
        self.repetitions, self.nsamples, self._per_rank = _ENDLESS, count, per == "rank"
        return self

    def repeat(self, nepochs: int = -1, nbatches: int = -1) -> Self:
        """So many passes over the source in one iteration, or so many items."""
        self.repetitions = nepochs if nepochs > 0 else _ENDLESS
        self.nsamples, self._per_rank = (nbatches if nbatches > 0 else _ENDLESS), False
        return self

    def with_length(self, n: int, silent: bool = False) -> Self:
        """Say what ``len`` is to be. Nothing else changes."""
        self._length = n
        return self

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError(
                f"object of type '{type(self).__name__}' has no len(): a stream of shards does not know it. Say it by "
                "with_length(n), or use penstock.ShardDataset, which counts"
            )
        return self._length

    def __bool__(self) -> bool:
        return True

    # Iteration.

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration. That of a state just loaded keeps its position.

        Raises:
            ConfigError: a negative epoch.
        """
        super().set_epoch(epoch)
        if self._loaded is None and self.pipeline:
            choose_epoch(self.pipeline[0], epoch)

    def open_behind(self, last: Stream | None, opening: StreamStart) -> Stream:
        """Return the stream of an epoch of a loader. It goes on behind the last one, or its source is told the epoch,
        if somebody chose that.
        """
        if opening.stream is None:
            if opening.chosen and self.pipeline:
                choose_epoch(self.pipeline[0], opening.epoch)
            elif (stream := self._alive(last)) is not None:
                return stream.following(opening.epoch)
        return super().open_behind(last, opening)

    def __iter__(self) -> Stream:
        stream = self._ending
        if stream is None or self._loaded is not None:
            return super().__iter__()
        self._stream = stream.following(self._epochs.next)
        self._epochs.begin(self._stream.epoch)
        return self._stream

    @property
    def _ending(self) -> _PipelineStream | None:
        """The last stream, if the next epoch goes on behind it."""
        return self._alive(self._stream) if self._times_set_at_start == self._epochs.times_set else None

    def _alive(self, last: Stream | None) -> _PipelineStream | None:
        """Return a stream, if the next epoch goes on behind it."""
        goes_on = self.repetitions == _ENDLESS and self.nsamples > 0
        return last if goes_on and isinstance(last, _PipelineStream) and last.alive else None

    def iterator(self) -> Stream:
        """Return the same as ``iter``."""
        return iter(self)

    # The protocol of resumable data sets.

    def first_cursor(self, epoch: int) -> State:
        """Return the cursor at the beginning of an epoch, with a stream of its own."""
        return {**self._identity(), "where": None, "origin": epoch, "epoch": epoch, "turn": 0, "had": 0, "steps": None}

    def check_cursor(self, cursor: Mapping[str, Any]) -> None:
        """Refuse a cursor of another pipeline, rank or worker.

        Raises:
            StateError: it is one, or damaged.
        """
        check_state(cursor, self._identity(), of="pipeline")
        for name in ("origin", "epoch", "turn", "had"):
            read_int(cursor, name, of="pipeline")
        steps = cursor.get("steps", 0)
        if steps is not None and not (isinstance(steps, list) and len(steps) == len(self.pipeline)):
            raise StateError(f"the state of this pipeline is damaged: steps is {cursor.get('steps')!r}")
        if "source" in cursor and not (self.pipeline and keeps_position(self.pipeline[0])):
            raise StateError(
                "this state has one of the pipeline's source, and here the source has none: resume with the same "
                "source, or start anew without the state"
            )
        if steps is not None or cursor["turn"]:  # where nothing has begun, anybody may go on
            check_state(cursor, {"where": self._where()}, of="pipeline")

    def _identity(self) -> State:
        return {
            "version": STATE_VERSION,
            "order_version": ORDER_VERSION,
            "seed": self.seed,
            "stages": len(self.pipeline),
            "items": [self.repetitions, self.nsamples, self._per_rank],
        }

    def _where(self) -> list[int]:
        return [*self._world.get(), *distributed.worker()]

    def open_at(self, cursor: State) -> Stream:
        """Return a stream from a cursor that was checked."""
        if not self.pipeline:
            raise ConfigError("a pipeline needs a source")
        for stage in self.pipeline[1:]:
            if not callable(stage) and not hasattr(stage, "run"):
                raise ConfigError(f"{stage!r}: not a valid pipeline stage")
        worker = distributed.worker()
        limit = None if self.nsamples < 0 else self.nsamples
        if limit is not None and self._per_rank:
            limit = limit // worker.total + (worker.id < limit % worker.total)
        context = Context(self.seed, int(cursor["origin"]), 0, self._world.get(), worker)
        starves = self._per_rank or worker.total == 1
        passes = _Passes([*self.pipeline], context, self.repetitions, limit, starves)
        return _PipelineStream(passes, {**cursor, "where": self._where()})

    def state_dict(self) -> State:
        """Return the cursor of the iterator that was made last in this process: numbers and short texts, no data.

        When an error has ended the iteration: behind the sample or batch that failed, as a loader's is; where a shuffle
        had not got it yet, at that sample.
        """
        state = super().state_dict()
        if self._loaded is not None or self._running is not None or self._stream is None:
            return state
        if self._ending is not None:
            return self._ending.next_cursor(self._epochs.next)
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

    # The end.

    def close(self) -> None:
        """Drop what is under way, with its files, and close stages that have ``close``. Idempotent."""
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
