"""`Position`: which epoch and batch a loader's consumer is at, and the state that says so.

    plan -> reader -> epoch plan -> requests           state = cursor(batches had)
    streams: no plan, the data set orders           state = where each worker is

Invariants: a loader's position is here and nowhere else. A state is a function of the batches that the consumer has
received, never of what was prefetched.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset

from penstock import distributed
from penstock.errors import ConfigError, StateError
from penstock.hashing import mix
from penstock.loader.dataloader_iter import Progress
from penstock.loader.messages import BatchRequest
from penstock.loader.source import plan_requests, why_unknown
from penstock.loader.stateful import WorkerStates
from penstock.plan.cursor import STATE_VERSION, Cursor, State, check_state, checked_epoch, read_int, read_mapping
from penstock.plan.epoch import BatchEpochPlan, EpochPlan, RemainingBatches, unknown_length
from penstock.plan.reader import PlanReader
from penstock.plan.stream import is_opened
from penstock.plan.stream_plan import EpochStart, StreamPlan
from penstock.samplers.base import EpochBatchSampler
from penstock.samplers.identity import fingerprint_of, own_order
from penstock.samplers.sequential import SequentialSampler
from penstock.samplers.shares import layers, rank_of
from penstock.sources.batched import StreamDataset

if TYPE_CHECKING:
    from penstock.loader.config import Ranges
    from penstock.loader.history import History

__all__ = ["Position", "base_seed_after"]


class Position:
    """Where one loader is.

    Args:
        dataset: the loader's.
        plan: of its batches; None for streams that only the data set can order.
        sampler: the one that gives single indices, if there is one.
        seed: the loader's own, None if it has none.
        layout: what the batches of a stream depend on besides itself.
        states: of users' objects, by worker.
        skip: steps to pass over.

    Raises:
        ConfigError: there are such steps, and nobody knows which step a batch is.
    """

    def __init__(
        self,
        dataset: Any,
        plan: EpochBatchSampler | None,
        sampler: Any,
        seed: int | None,
        layout: State,
        states: WorkerStates,
        skip: Ranges = (),
    ) -> None:
        self.dataset = dataset
        self.plan = plan
        self.states = states
        self._seed = seed
        self._layout = layout
        self._warned = False
        self._epoch_had: int | None = None  # of which a run has had batches, for that warning
        self._reader = None if plan is None else PlanReader(plan, seed=seed)
        self._stream = PlanReader(StreamPlan(dataset)) if plan is None and is_opened(dataset) else None
        """Of the epochs of a data set that gives streams. Where a stream is, its worker's state says."""
        self._progress: Progress | None = None
        self._base_seed: int | None = None  # of the next pass: loaded, or drawn when somebody asked
        self._ahead: frozenset[int] = frozenset()
        self._skipped = 0  # batches that the next pass leaves out
        self._users_epoch: int | None = None  # what a user's stream is told, once somebody has set it
        self._chosen = False  # for the pass that comes, which else is of the epoch after
        self.samples: Any = dataset.samples if isinstance(dataset, StreamDataset) else dataset
        """The map-style data set; that inside an iterable one of ours."""
        unknown = why_unknown(plan, self.samples)
        if skip and unknown:
            raise ConfigError(f"skip= counts steps as a ledger does: {unknown}")
        self._counts = unknown is None
        self._history = self._new_history(skip) if skip else None
        """Of the job, where steps have numbers and somebody has asked for them."""
        own = None if isinstance(dataset, IterableDataset) else own_order(dataset)
        reads_own = isinstance(sampler, SequentialSampler) and sampler.inner is not None
        self._under: PlanReader[EpochPlan] | None = None if own is None or reads_own else PlanReader(own)
        """Of a data set with an order of its own, over which the user's sampler stands."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_progress": None}

    def follow(self, other: Position) -> None:
        """Begin where another position's next pass would begin, for a copy of its loader."""
        if self._reader is not None and other._reader is not None:
            self._reader, plan = copy.copy(other._reader), self._reader.plan
            self._reader.plan = plan
        if self._under is not None and other._under is not None:
            self._under, own = copy.copy(other._under), self._under.plan
            self._under.plan = own
        if self._stream is not None and other._stream is not None:
            self._stream, epochs = copy.copy(other._stream), self._stream.plan
            self._stream.plan = epochs
        self._base_seed, self._ahead, self._skipped = other._base_seed, other._ahead, other._skipped
        self._history = other._history
        self._users_epoch, self._chosen = other._users_epoch, other._chosen

    @property
    def rank(self) -> int:
        """Whose share this is: the data set's rank or the sampler's, if they say one; it need not be the global one."""
        rank = getattr(self.samples, "rank", None)
        if isinstance(rank, int):
            return rank
        world = distributed.current()
        rank = None if self.plan is None else rank_of(self.plan.source, ranks=world.world_size)
        return world.rank if rank is None else rank

    @property
    def seeded(self) -> bool:
        """Whether order and samples follow from a seed, the loader's or its sampler's."""
        return self._seed is not None or (self.plan is not None and self.plan.key_seed is not None)

    @property
    def epoch(self) -> int:
        """The epoch that runs, or will run next."""
        reader = self._any_reader
        if reader is None:
            return int(getattr(self.dataset, "epoch", 0) if self._users_epoch is None else self._users_epoch)
        return reader.run.epoch if self.running and reader.run is not None else reader.epoch

    @property
    def told(self) -> EpochStart:
        """The epoch that workers are told: that of streams, for nothing else has to know it there."""
        if self._reader is not None:
            return None
        return self._users_epoch if self._stream is None else self._stream.run

    @property
    def _any_reader(self) -> PlanReader[Any] | None:
        """Of batches, or of the epochs of streams; None where a user's data set counts its epochs itself."""
        return self._stream if self._reader is None else self._reader

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass. The epoch of a state just loaded keeps its position."""
        if self._reader is not None:
            before = self.epoch
            if self._under is not None:
                self._under.set_epoch(epoch)
            self._reader.set_epoch(epoch)
            if epoch != before:
                self._ahead, self._skipped = frozenset(), 0
        elif self._stream is not None:
            self._stream.set_epoch(checked_epoch(epoch))
        elif hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
            self._users_epoch, self._chosen = epoch, True
        else:
            raise ConfigError(f"{type(self.dataset).__name__} is iterable-style and has no set_epoch of its own")

    def skip(self, batches: int) -> None:
        """Let the next pass begin behind the first so many batches of its epoch, whatever state was loaded.

        The indices of those batches are drawn, and none of them is made. A stream without a plan of ours has nothing
        to skip them by: its next pass is whole.
        """
        self._progress, self._ahead = None, frozenset()
        if self._reader is None:
            self.states.load(None)
            if self._stream is not None:
                self._stream.choose(Cursor(epoch=self._stream.epoch))
            return
        self._reader.choose(Cursor(epoch=self._reader.epoch))
        self._skipped = batches

    def pass_over(self, batches: int) -> None:
        """Let the next pass begin so many batches behind where the consumer is.

        Raises:
            ConfigError: a number that is no count, more than the epoch has left, or a stream.
        """
        if self._reader is None:
            raise ConfigError("a stream has no batches to pass over by their number: leave them out in the loop")
        progress, history = self._present()
        assert progress.run is not None
        run, begin = _whole(progress.run), _at(progress.run, progress.count)
        left = _length(run) - begin
        if batches < 0 or batches > left:
            raise ConfigError(f"skip takes 0 to {left} batches, which epoch {run.epoch} has left, got {batches}")
        cursor = run.cursor(begin + batches)
        self._progress, self._ahead, self._skipped = None, frozenset(), 0
        self._history = None if history is None else history.passing(history.first + begin, batches)
        self._reader.choose(cursor, loaded=True)

    # A pass.

    def continues(self, progress: Progress) -> bool:
        """The consumer of a pass asks for a batch, and so this pass is where it is, also if its epoch was set once more
        since (Lightning sets it after ``iter()``). False if nothing was had yet and another epoch was set: that one is
        to begin in its place.
        """
        reader = self._any_reader
        if reader is None or self._progress is not progress or reader.run is None:
            return True
        return reader.continues(reader.run, delivered=progress.had > 0)

    @property
    def running(self) -> bool:
        """Whether a pass is under way: nothing else was chosen since, or its consumer still holds the iterator."""
        progress, reader = self._progress, self._any_reader
        if progress is None:
            return False
        return reader is None or reader.current or (reader.start_requested and progress.had > 0 and progress.is_held())

    def base_seed(self, draw: Callable[[], int]) -> int:
        """Of the pass that begins next: that of a loaded state, else drawn, but only once."""
        if self._base_seed is None:
            self._base_seed = draw()
        return self._base_seed

    def start(self, base_seed: int) -> Progress:
        """A pass begins.

        Args:
            base_seed: its own, from `base_seed`.
        """
        self._base_seed = None
        if self._reader is not None:
            if self._ahead and not self._reader.resumes:
                self._ahead = frozenset()  # of an epoch that nobody wants any more
            if self._progress is not None and self._progress.had:
                self._epoch_had = _epoch(self._progress)
            if self._under is not None:
                self._under.start(advance=self.seeded)
            run = self._reader.start(advance=self._advances, delivered=_delivered(self._progress))
            self._warn_of_same_epoch(run)
            self._progress, self._history = self._beginning(run, base_seed)
            self._chosen, self._skipped, self._ahead = False, 0, frozenset()
            return self._progress
        if self._stream is not None:
            if self.states.resumes and not self._stream.resumes:
                self.states.leave()  # of an epoch that nobody wants any more
            self._stream.start(advance=True)
        elif self._users_epoch is not None:
            self._users_epoch += not self._chosen
        self._chosen = False
        self._progress = Progress(None, base_seed)
        return self._progress

    def _beginning(self, run: BatchEpochPlan, base_seed: int = 0) -> tuple[Progress, History | None]:
        """Return how a pass over a run begins, without what is passed over and what was had ahead; and the job's
        history until then.
        """
        history = None if self._history is None else self._history.followed(run)
        left = run if history is None else history.left(run, self._skipped)
        if history is None and self._skipped:
            left = RemainingBatches(run, [(0, self._skipped)])
        numbers = (left.number(at) if isinstance(left, RemainingBatches) else at for at in self._ahead)
        return Progress(left, base_seed, frozenset(number for number in numbers if number is not None)), history

    def _present(self) -> tuple[Progress, History | None]:
        """Return how far the consumer of the pass that runs, or else of the next one, is; and the job's history."""
        progress = self._progress
        if self._history is None and self._counts:
            self._history = self._new_history()
            if self.running and progress is not None and progress.run is not None:
                self._history = self._history.followed(_whole(progress.run))
        if self.running and progress is not None and progress.run is not None:
            return progress, self._history
        assert self._reader is not None
        return self._beginning(self._reader.peek())

    def requests(self, progress: Progress) -> Iterator[BatchRequest]:
        """What is to be made in a pass."""
        run = progress.run
        if run is None:
            return _endless()
        seed = self._seed if self._seed is not None else run.seed
        under = None if self._under is None else self._under.run
        if under is not None and under.grows:
            raise unknown_length()
        key_seed = progress.base_seed if seed is None else seed
        requests = plan_requests(
            run,
            # Positions that are one rank's alone are those of other samples on other ranks.
            mix(key_seed, self.rank) if run.per_rank or self._under is not None else key_seed,
            under=under,
        )
        return _without(requests, progress.had_before) if progress.had_before else requests

    def finished(self, progress: Progress, *, fresh: Callable[[], bool]) -> None:
        """The consumer has had everything: what is next is a whole pass, with a seed that of the next epoch.

        A StopIteration that escapes from a data set ends a loop too, as in torch; that epoch is not had to its end.
        """
        if self._progress is progress and (progress.run is None or progress.count >= _length(progress.run)):
            self._progress, self._epoch_had = None, _epoch(progress)
            self.states.finish(fresh=fresh())
            if self._reader is not None:
                if self._under is not None:
                    self._under.finish(advance=self.seeded)
                self._reader.finish(advance=self._advances, delivered=_delivered(progress))
            elif self._stream is not None:
                self._stream.finish(advance=True)
            elif self._users_epoch is not None and not self._chosen:
                self._users_epoch, self._chosen = self._users_epoch + 1, True

    @property
    def _advances(self) -> bool:
        assert self.plan is not None
        return self.seeded and self.plan.advances

    def _warn_of_same_epoch(self, run: BatchEpochPlan) -> None:
        """Warn, once, if a sampler whose epoch is its user's begins the same one again, in a run with a seed."""
        assert self.plan is not None
        if self._warned or self._seed is None or self.plan.advances or run.epoch != self._epoch_had:
            return
        samplers = list(layers(self.plan.source))
        if all(getattr(sampler, "shuffle", True) for sampler in samplers):
            self._warned = True
            name = type(samplers[-1]).__name__
            warnings.warn(
                f"epoch {run.epoch} of this {name} begins a second time, with the same order and the same draws: call "
                f"its set_epoch(epoch) before each epoch, as without seed=",
                stacklevel=5,
            )

    @property
    def had(self) -> int:
        """Batches that the consumer has had of the run that is under way; 0 between runs."""
        return self._progress.count if self._progress is not None and self.running else 0

    # What others ask of the plan.

    def peek(self) -> BatchEpochPlan:
        """Return the batches of the pass that runs, or of the next one, without beginning it."""
        run = self._present()[0].run
        assert run is not None
        return run

    def preview(self) -> BatchEpochPlan:
        """Return the batches of the next pass for somebody who only looks: what that draws is still to be drawn."""
        assert self._reader is not None
        run = self._beginning(self._reader.preview())[0].run
        assert run is not None
        return run

    def whole(self) -> BatchEpochPlan:
        """Return all batches of the epoch that runs, or of the next one."""
        assert self._reader is not None
        whole, history = self._reader.whole(), self._history
        if history is None or not history.skip:
            return whole
        run = self._reader.peek()
        # An epoch that was dealt out anew ends where it ends: its beginning had other steps.
        first = history.followed(run).first + len(run) - len(whole)
        return replace(history, first=first).left(whole)

    def _new_history(self, skip: Ranges = ()) -> History:
        # Few loaders are asked for a state before their first batch.
        from penstock.loader.history import new_history

        return new_history(skip, parts=getattr(own_order(self.samples), "mini_epochs", 1))

    # State.

    def state_dict(self) -> State:
        """See `DataLoader.state_dict`."""
        progress, running, left = self._progress, self.running, False
        state: State = {"version": STATE_VERSION, **self._identity()}
        if self._reader is None:
            state.update(self._layout)
            if self._stream is not None:
                opening = self._stream.run if running and self._stream.run is not None else self._stream.peek()
                state["stream"] = opening.state()
                left = not running and not self._stream.resumes
            elif self._users_epoch is not None:
                state["epoch"] = self._users_epoch
        else:
            here, history = self._present()
            assert here.run is not None
            at = _at(here.run, here.count)
            cursor = here.run.cursor(here.count)
            state["sampler"] = cursor.state()
            if cursor.data is not None:
                state["fingerprint"] = cursor.data
            state.update(self._overtaking(_at(here.run, number) - at for number in here.ahead))
            if history is not None:
                state.update(history.state(at))
        if self._under is not None:
            state["dataset"] = self._under.cursor(0).state()
        base_seed = progress.base_seed if progress is not None and running else self._base_seed
        if base_seed is not None and not self.seeded:
            state["base_seed"] = base_seed
        if (workers := self.states.state(left=left)) is not None:
            state["workers"] = workers
        return state

    def _overtaking(self, ahead: Iterable[int]) -> State:
        """Batches had before ones with smaller numbers, counted from the first gap; they are this rank's alone."""
        numbers = sorted(ahead)
        return {"ahead": numbers, "world": list(distributed.current())} if numbers else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `DataLoader.load_state_dict`."""
        of = "DataLoader"
        self.check(state)
        cursor = under = opening = None
        if self.plan is None:
            check_state(state, self._layout, of=of)
            if self._stream is not None:
                opening = self._stream.plan.read(read_mapping(state, "stream", of=of))
        else:
            cursor = self.plan.read(read_mapping(state, "sampler", of=of))
        if self._under is not None:
            under = self._under.plan.read(read_mapping(state, "dataset", of=of))
        ahead = self._read_ahead(state)
        base_seed = read_int(state, "base_seed", of=of, below=1 << 63) if "base_seed" in state else None
        if self.seeded and cursor is not None and cursor.consumed:
            # The pass drew one when it began: a generator that was saved with this state is behind that.
            base_seed = mix(cursor.epoch, cursor.consumed) >> 1
        workers = self.states.read(state.get("workers"))
        history = (self._history or self._new_history()).read(state) if self._counts else None
        # All is checked: what follows cannot fail and leave the loader between two states.
        if self._reader is not None and cursor is not None:
            self._reader.choose(cursor, loaded=True)
        elif self._stream is not None and opening is not None:
            self._stream.choose(opening, loaded=True)
        elif "epoch" in state:
            self.set_epoch(read_int(state, "epoch", of=of))
        if self._under is not None and under is not None:
            self._under.choose(under, loaded=True)
        self.states.load(state.get("workers"), workers)
        self._ahead, self._skipped, self._history = ahead, 0, history
        self._base_seed = base_seed
        self._progress = self._epoch_had = None

    def check(self, state: Mapping[str, Any]) -> None:
        """Refuse the state of a loader with another seed, or over other data.

        Raises:
            StateError: it is one.
        """
        identity, order = self._identity(), own_order(self.samples)
        if order is not None and isinstance(state, Mapping) and order.is_known_as(state.get("fingerprint")):
            identity.pop("fingerprint")
        check_state(state, {"version": STATE_VERSION, **identity}, of="DataLoader")

    def _read_ahead(self, state: Mapping[str, Any]) -> frozenset[int]:
        if self.plan is None or not state.get("ahead"):
            return frozenset()
        check_state(state, {"world": list(distributed.current())}, of="DataLoader with in_order=False")
        numbers = state["ahead"]
        if not isinstance(numbers, list) or not all(type(number) is int and number > 0 for number in numbers):
            raise StateError(f"the state of this DataLoader is damaged: ahead is {numbers!r}, no list of batch numbers")
        return frozenset(numbers)

    def load_grown(self, state: Mapping[str, Any]) -> None:
        """The same over a manifest that has grown."""
        own = own_order(self.samples)
        if self._reader is None or self._under is not None or own is None:
            raise ConfigError("allow_growth needs a data set with an order of its own: RankDataset, MPDataset")
        check_state(state, {"version": STATE_VERSION, "seed": self._seed}, of="DataLoader")
        history = (self._history or self._new_history()).read(state) if self._counts else None
        self._reader.choose(own.read_grown(read_mapping(state, "sampler", of="DataLoader")), loaded=True)
        self._progress, self._skipped, self._history = None, 0, history

    def _identity(self) -> State:
        return {"seed": self._seed, "fingerprint": fingerprint_of(self.dataset)}


def base_seed_after(base_seed: int) -> int:
    """Base seed of the next pass of workers that outlive this one: torch draws one for all of them."""
    return mix(base_seed, 1) >> 1


def _endless() -> Iterator[BatchRequest]:
    while True:
        yield BatchRequest([], [])


def _without(requests: Iterator[BatchRequest], numbers: frozenset[int]) -> Iterator[BatchRequest]:
    return (request for number, request in enumerate(requests) if number not in numbers)


def _epoch(progress: Progress) -> int | None:
    return None if progress.run is None else progress.run.epoch


def _delivered(progress: Progress | None) -> int:
    """Batches that the consumer of a pass has had of its epoch plan, with those that the pass left out."""
    return 0 if progress is None else progress.count if progress.run is None else _at(progress.run, progress.count)


def _at(run: BatchEpochPlan, count: int) -> int:
    """Return the number in the epoch plan of the batch that comes behind ``count`` of a pass."""
    return run.at(count) if isinstance(run, RemainingBatches) else count


def _whole(run: BatchEpochPlan) -> BatchEpochPlan:
    """Return the epoch plan of a pass."""
    return run.whole if isinstance(run, RemainingBatches) else run


def _length(run: BatchEpochPlan) -> int:
    """Batches of a pass; 0 where nobody knows."""
    try:
        return len(run)
    except TypeError:
        return 0
