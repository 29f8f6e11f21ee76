"""`DataPipeline`: a source and stages over it, with epochs and a state.

    pipeline = DataPipeline(SimpleShardList(urls), split_by_worker, tarfile_to_samples(), shuffle(1000), decode("rgb8"))
    for sample in pipeline: ...

    state = pipeline.state_dict()         at any sample
    pipeline.load_state_dict(state)       in another process: the next iteration goes on behind that sample

Invariant: what comes out is a function of (stages, seed, epoch, rank, worker); the state is that of the items that were
handed out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self

from torch.utils.data import DataLoader, IterableDataset

from penstock import distributed
from penstock.datasets.clock import Clock
from penstock.errors import ConfigError, StateError
from penstock.order import ORDER_VERSION
from penstock.order.hashing import derive_key
from penstock.plan.cursor import STATE_VERSION, State, check_state, read_int
from penstock.wds import utils
from penstock.wds.allow import KINDS, allow, allowed
from penstock.wds.steps import Context, Step, open_steps
from penstock.wds.utils import PipelineStage

__all__ = ["DataPipeline"]

_ENDLESS = -1


class _Run:
    """A stream under way.

    ``origin`` is the epoch it began with; ``epoch`` the one that is being handed out, of which there were ``had``
    items; ``turn`` how often the source was begun again.
    """

    def __init__(self, origin: int, epoch: int, times: int) -> None:
        self.origin, self.epoch, self.times = origin, epoch, times
        self.turn = self.had = self.turns = 0
        self.fresh = True  # nothing of this turn yet
        self.over = False
        self.step: Step | None = None
        self.failed: Step | None = None
        self.loaded: list[Any] | None = None
        self.pid = os.getpid()

    @property
    def alive(self) -> bool:
        """Whether there is something to go on with."""
        return self.pid == os.getpid() and (self.step is not None or self.loaded is not None)


class DataPipeline(IterableDataset[Any], PipelineStage):
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
        self._fresh()

    def _fresh(self) -> None:
        self._clock = Clock()
        self._run: _Run | None = None
        self._resume: State | None = None

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
        new._fresh()
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

        Where workers end with each epoch, and after `set_epoch`, the stream begins anew, in another order.
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

    @property
    def epoch(self) -> int:
        """The epoch that is being read, or else the one that comes."""
        if self._resume is not None:
            return int(self._resume["epoch"])
        return self._clock.peek()[0] if self._run is None or self._run.over else self._run.epoch

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the next iteration. That of a state just loaded keeps its position.

        Raises:
            ConfigError: a negative epoch.
        """
        if epoch < 0:
            raise ConfigError(f"epoch must be 0 or more, got {epoch}")
        if self._resume is not None and epoch == self._resume["epoch"]:
            return
        self._resume = None
        self._clock.set(epoch)
        source: Any = self.pipeline[0] if self.pipeline else None
        streams = isinstance(source, DataLoader) and isinstance(source.dataset, IterableDataset)
        if hasattr(source, "set_epoch") and not streams:  # those are told when a pass begins
            source.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        self._check()
        resume, self._resume = self._resume, None
        run = self._run
        if resume is not None and resume["steps"] is None:  # between two epochs
            self._clock.set(int(resume["epoch"]))
            if resume.get("source") is not None:
                self.pipeline[0].load_state_dict(resume["source"])
            resume = None
        if resume is not None:
            # A loader of torch's hands what was loaded to its workers, and each would go on from there.
            check_state(resume, {"where": self._where()}, of="pipeline")
            self._clock.resumed(int(resume["epoch"]))
            run = _Run(int(resume["origin"]), int(resume["epoch"]), self._clock.peek()[1])
            run.turn, run.had, run.turns = (int(resume[name]) for name in ("turn", "had", "turns"))
            run.fresh, run.loaded = bool(resume["fresh"]), resume["steps"]
        else:
            epoch, times = self._clock.next()
            goes_on = self.repetitions == _ENDLESS and self.nsamples > 0
            if goes_on and run is not None and run.alive and run.times == times:
                run.epoch, run.had, run.turns, run.over = epoch, 0, 0, False
            else:
                run = _Run(epoch, epoch, times)
        assert run is not None
        self._run = run
        return self._items(run)

    def _check(self) -> None:
        if not self.pipeline:
            raise ConfigError("a pipeline needs a source")
        for number, stage in enumerate(self.pipeline):
            if number and not callable(stage) and not hasattr(stage, "run"):
                raise ConfigError(f"{stage!r}: not a valid pipeline stage")

    def _limit(self) -> int | None:
        if self.nsamples < 0:
            return None
        if not self._per_rank:
            return self.nsamples
        worker = distributed.worker()
        return self.nsamples // worker.total + (worker.id < self.nsamples % worker.total)

    def _context(self, run: _Run) -> Context:
        return Context(self.seed, run.origin, run.turn, self._world.get(), distributed.worker())

    def _open(self, run: _Run) -> Step:
        loaded, run.loaded = run.loaded, None
        run.step = open_steps(self.pipeline, self._context(run), loaded)
        return run.step

    def _items(self, run: _Run) -> Iterator[Any]:
        limit = self._limit()
        while limit is None or run.had < limit:
            step = run.step or self._open(run)
            try:
                for item in step:
                    run.had += 1
                    run.fresh = False
                    yield item
                    if limit is not None and run.had >= limit:
                        run.over = True
                        return
            except Exception:
                run.step, run.failed = None, step  # generators do not go on behind an error, but a state does
                raise
            run.step = None
            run.turns += 1
            if 0 < self.repetitions <= run.turns:
                break
            if run.fresh and not self._per_rank and distributed.worker().total > 1:
                break  # this worker has no shard, and the others give theirs
            if run.fresh:
                raise ConfigError("the pipeline gave no sample at all, and was to be repeated until there are some")
            run.turn, run.fresh = run.turn + 1, True
        run.over = True

    def iterator(self) -> Iterator[Any]:
        """The same as ``iter``."""
        return iter(self)

    # State.

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

    def state_dict(self) -> State:
        """Where this pipeline is, in this process: numbers and short texts, none of the data.

        When an error has ended the iteration: behind the sample or batch that failed, as a loader's is; where a shuffle
        had not got it yet, at that sample.
        """
        if self._resume is not None:
            return dict(self._resume)
        run, state = self._run, self._identity()
        if run is None or (run.over and not run.alive):
            source: Any = self.pipeline[0] if self.pipeline else None
            own = source.state_dict() if run is not None and _has_state(source) else None
            return {**state, "epoch": self._clock.peek()[0], "steps": None, "source": own}
        over, step = run.over, run.step or run.failed
        return {
            **state,
            "where": self._where(),
            "origin": run.origin,
            "epoch": run.epoch + over,
            "turn": run.turn,
            "turns": 0 if over else run.turns,
            "had": 0 if over else run.had,
            "fresh": run.fresh,
            "steps": run.loaded if step is None else step.state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state at the next iteration.

        Raises:
            StateError: it is of another pipeline, rank or worker.
        """
        begun = isinstance(state, Mapping) and state.get("steps") is not None
        check_state(state, {**self._identity(), **({"where": self._where()} if begun else {})}, of="pipeline")
        for name in ("epoch", "origin", "turn", "turns", "had") if begun else ("epoch",):
            read_int(state, name, of="pipeline")
        if "steps" not in state or (begun and not isinstance(state["steps"], list)):
            raise StateError(f"the state of this pipeline is damaged: steps is {state.get('steps')!r}")
        if begun and not isinstance(state.get("fresh"), bool):
            raise StateError(f"the state of this pipeline is damaged: fresh is {state.get('fresh')!r}")
        self._resume = dict(state)
        self._run = None

    def __getstate__(self) -> dict[str, Any]:
        kinds = [kind for kind in KINDS if allowed(kind)]
        return {**self.__dict__, "_run": None, "_permissions": kinds, "_secure": utils.enforce_security}

    def __setstate__(self, state: dict[str, Any]) -> None:
        allow(*state.pop("_permissions", ()))
        utils.enforce_security = state.pop("_secure", False) or utils.enforce_security
        self.__dict__.update(state)

    # The end.

    def close(self) -> None:
        """Drop what is under way, with its files, and close stages that have ``close``. Idempotent."""
        self._run = None
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


def _has_state(source: Any) -> bool:
    return hasattr(source, "state_dict") and hasattr(source, "load_state_dict")
