"""`DataPipeline`: a source and stages over it, with epochs and a cursor.

    pipeline = DataPipeline(SimpleShardList(urls), split_by_worker, tarfile_to_samples(), shuffle(1000), decode("rgb8"))
    for sample in pipeline: ...

    state = pipeline.state_dict()         at any sample
    pipeline.load_state_dict(state)       in another process: the next iteration continues after that sample

Invariant: the items are a function of (stages, seed, epoch, rank, worker); the state counts the delivered items.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, NamedTuple, Self

from penstock import distributed
from penstock.datasets.mixture_stream import EpochDataset, EpochStream
from penstock.errors import ConfigError, StateError, escaped
from penstock.hashing import derive_key
from penstock.order import ORDER_VERSION
from penstock.plan.cursor import State, check_state, read_int
from penstock.plan.source_stream import keeps_position
from penstock.plan.stream import Stream, StreamStart
from penstock.wds import utils
from penstock.wds.iterators import Context, Step, choose_epoch, open_steps
from penstock.wds.utils import KINDS, PipelineStage, allow, allowed

_ENDLESS = -1


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
