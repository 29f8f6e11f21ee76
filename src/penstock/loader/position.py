"""`Position`: which epoch and batch a loader's consumer is at, and the state that says so.

    source -> pass -> tasks                         state = pass.state(batches had)
    streams: no source, the data set orders         state = where each worker is

Invariant: a state is a function of the batches that the consumer has received, never of what was prefetched.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch.utils.data import IterableDataset

from penstock import distributed
from penstock.datasets.base import StreamDataset
from penstock.errors import ConfigError, StateError
from penstock.loader.delivery import Progress
from penstock.loader.source import plan
from penstock.loader.stateful import WorkerStates
from penstock.loader.work import Task
from penstock.order.hashing import mix
from penstock.samplers.base import Batch, BatchPass, EpochBatchSampler, exhaust
from penstock.samplers.identity import fingerprint_of
from penstock.samplers.sequential import SequentialSampler
from penstock.state import STATE_VERSION, State, check_state, read_int, read_mapping

__all__ = ["Position", "base_seed_after"]


class Position:
    """Where one loader is.

    Args:
        dataset: the loader's.
        source: of its batches; None for streams that only the data set can order.
        sampler: the one that gives single indices, if there is one.
        seed: the loader's own, None if it has none.
        layout: what the batches of a stream depend on besides itself.
        states: of users' objects, by worker.
        in_order: whether batches come in the order of their numbers.
    """

    def __init__(
        self,
        dataset: Any,
        source: EpochBatchSampler | None,
        sampler: Any,
        seed: int | None,
        layout: State,
        states: WorkerStates,
        *,
        in_order: bool,
    ) -> None:
        self.dataset = dataset
        self.source = source
        self.states = states
        self._seed = seed
        self._layout = layout
        self._in_order = in_order
        self._progress: Progress | None = None
        self._base_seed: int | None = None  # of the next pass: loaded, or drawn when somebody asked
        self._ahead: frozenset[int] = frozenset()
        self._skipped = 0  # batches that the next pass leaves out
        self.stream_epoch: int | None = None  # what a stream is told, once somebody has set it
        self._chosen = False  # for the pass that comes, which else is of the epoch after
        self.samples: Any = dataset.samples if isinstance(dataset, StreamDataset) else dataset
        """The map-style data set; that inside an iterable one of ours."""
        own_order = isinstance(sampler, SequentialSampler) and sampler.delegates
        self.shuffles_a_share = (
            hasattr(dataset, "start_pass") and not isinstance(dataset, IterableDataset) and not own_order
        )
        """Whether the user's own sampler stands over a data set that keeps a place itself."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_progress": None}

    @property
    def rank(self) -> int:
        """Whose share this is: the data set's rank, if it has one, which need not be the global one."""
        rank = getattr(self.samples, "rank", None)
        return rank if isinstance(rank, int) else distributed.current().rank

    @property
    def seeded(self) -> bool:
        """Whether order and samples follow from a seed, the loader's or its sampler's."""
        return self._seed is not None or (self.source is not None and self.source.peek().seed is not None)

    @property
    def epoch(self) -> int:
        """The epoch that runs, or will run next."""
        if self.source is None:
            return int(getattr(self.dataset, "epoch", 0) if self.stream_epoch is None else self.stream_epoch)
        if self._progress is not None and self._progress.run is not None and self.source.running:
            return self._progress.run.epoch
        return self.source.peek().epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass. The epoch of a state just loaded keeps its position."""
        if self.source is not None:
            if self.shuffles_a_share:
                self.dataset.set_epoch(epoch)
            before = self.source.peek().epoch
            self.source.set_epoch(epoch)
            if epoch != before:
                self._ahead, self._skipped = frozenset(), 0
        elif hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
            self.stream_epoch, self._chosen = epoch, True
        else:
            raise ConfigError(f"{type(self.dataset).__name__} is iterable-style and has no set_epoch of its own")

    def skip(self, batches: int) -> None:
        """Let the next pass begin behind the first so many batches of its epoch, whatever state was loaded.

        The indices of those batches are drawn, and none of them is made. A stream without a source of ours has nothing
        to skip them by: its next pass is whole.
        """
        self._progress, self._ahead = None, frozenset()
        if self.source is None:
            self.states.load(None)
            return
        if hasattr(self.samples, "start_pass"):
            # It keeps the place of a loaded state until it is told of another epoch.
            epoch = self.source.peek().epoch
            self.set_epoch(epoch + 1)
            self.set_epoch(epoch)
        self.source.finish()
        self._skipped = batches

    # A pass.

    def goes_on(self, progress: Progress) -> bool:
        """The consumer of a pass asks for a batch, and so this pass is where it is, also if its epoch was set once more
        since (Lightning sets it after ``iter()``). False if nothing was had yet and another epoch was set: that one is
        to begin in its place.
        """
        source, run = self.source, progress.run
        if source is None or run is None or self._progress is not progress or source.running:
            return True
        if not progress.had and source.peek().epoch != run.epoch:
            exhaust(run)
            return False
        source.resume(run.whole if isinstance(run, _Rest) else run)
        return True

    @property
    def running(self) -> bool:
        """Whether a pass is under way."""
        return self._progress is not None and (self.source is None or self.source.running)

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
        run = None
        if self.source is not None:
            if self.seeded and self.source.running:
                self._advance(self.source)
            if self.shuffles_a_share:
                self.dataset.start_pass()
            run = self.source.start()
            skipped, self._skipped = self._skipped, 0
            run = _Rest(run, skipped) if skipped else run
        elif self.stream_epoch is not None:
            self.stream_epoch += not self._chosen
        self._chosen = False
        ahead, self._ahead = self._ahead, frozenset()
        self._progress = Progress(run, base_seed, ahead)
        return self._progress

    def tasks(self, progress: Progress) -> Iterator[Task]:
        """What is to be made in a pass."""
        run = progress.run
        if run is None:
            return _endless()
        seed = self._seed if self._seed is not None else run.seed
        place = getattr(self.samples, "place", None) if hasattr(self.samples, "start_pass") else None
        key_seed = progress.base_seed if seed is None else seed
        tasks = plan(run, key_seed, rank=self.rank, place=place, elastic=not self.shuffles_a_share)
        return _without(tasks, frozenset(progress.ahead)) if progress.ahead else tasks

    def finished(self, progress: Progress, *, fresh: Callable[[], bool]) -> None:
        """The consumer has had everything: what is next is a whole pass, with a seed that of the next epoch.

        A StopIteration that escapes from a data set ends a loop too, as in torch; that epoch is not had to its end.
        """
        if self._progress is progress and (progress.run is None or progress.count >= _length(progress.run)):
            self._progress = None
            self.states.begin(fresh=fresh())
            if self.source is not None:
                self._advance(self.source) if self.seeded else self.source.finish()
            elif self.stream_epoch is not None and not self._chosen:
                self.stream_epoch, self._chosen = self.stream_epoch + 1, True

    def _advance(self, source: EpochBatchSampler) -> None:
        """Go on to what comes next, unless somebody has chosen it since."""
        source.advance()
        if self.shuffles_a_share and self.dataset.running:
            self.dataset.next_mini_epoch()

    # State.

    def state_dict(self) -> State:
        """See `DataLoader.state_dict`."""
        progress = self._progress
        state: State = {"version": STATE_VERSION, **self._identity()}
        running = progress is not None and (self.source is None or self.source.running)
        if self.source is None:
            state.update(self._layout)
            if self.stream_epoch is not None:
                state["epoch"] = self.stream_epoch
        elif progress is not None and progress.run is not None and running:
            state["sampler"] = progress.run.state(progress.count)
            state.update(self._overtaking(number - progress.count for number in progress.ahead))
        else:
            state["sampler"] = self.source.peek().state(self._skipped)
            state.update(self._overtaking(self._ahead))
        if self.shuffles_a_share:
            state["dataset"] = self.dataset.state_dict()
        base_seed = progress.base_seed if progress is not None and running else self._base_seed
        if base_seed is not None and not self.seeded:
            state["base_seed"] = base_seed
        if (workers := self.states.state()) is not None:
            state["workers"] = workers
        return state

    def _overtaking(self, ahead: Iterable[int]) -> State:
        """Batches had before ones with smaller numbers, counted from the first gap; they are this rank's alone."""
        numbers = sorted(ahead)
        return {"ahead": numbers, "world": list(distributed.current())} if numbers else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `DataLoader.load_state_dict`."""
        check_state(state, {"version": STATE_VERSION, **self._identity()}, of="DataLoader")
        ahead: frozenset[int] = frozenset()
        if self.source is None:
            check_state(state, self._layout, of="DataLoader")
        elif "sampler" not in state:
            raise StateError("this is no state of such a DataLoader: 'sampler' is missing")
        elif state.get("ahead"):
            check_state(state, {"world": list(distributed.current())}, of="DataLoader with in_order=False")
            numbers = state["ahead"]
            if not isinstance(numbers, list) or not all(type(number) is int and number > 0 for number in numbers):
                raise StateError("the state of this DataLoader is damaged: 'ahead' holds no numbers of batches")
            ahead = frozenset(numbers)
        base_seed = read_int(state, "base_seed", of="DataLoader", below=1 << 63) if "base_seed" in state else None
        workers = self.states.read(state.get("workers"))
        if self.source is not None:
            self._load_source(self.source, state)
        elif "epoch" in state:
            self.set_epoch(read_int(state, "epoch", of="DataLoader"))
        # All is checked: what follows cannot fail and leave the loader between two states.
        self.states.load(state.get("workers"), workers)
        self._ahead, self._skipped = ahead, 0
        self._base_seed = base_seed
        self._progress = None

    def _load_source(self, source: EpochBatchSampler, state: Mapping[str, Any]) -> None:
        """Put sampler and data set where a state says, or leave both as they were."""
        if not self.shuffles_a_share:
            source.load_state_dict(state["sampler"])
            return
        before = self.dataset.state_dict()
        self.dataset.load_state_dict(read_mapping(state, "dataset", of="DataLoader"))
        try:
            source.load_state_dict(state["sampler"])
        except StateError:
            self.dataset.load_state_dict(before)
            raise

    def load_grown(self, state: Mapping[str, Any]) -> None:
        """The same over a manifest that has grown."""
        if self.source is None or self.shuffles_a_share or not hasattr(self.samples, "start_pass"):
            raise ConfigError("allow_growth needs a data set with an order of its own: RankDataset, MPDataset")
        check_state(state, {"version": STATE_VERSION, "seed": self._seed}, of="DataLoader")
        self.samples.load_state_dict(state.get("sampler"), allow_growth=True)
        self.source.finish()
        self._progress, self._skipped = None, 0

    def _identity(self) -> State:
        return {"seed": self._seed, "fingerprint": fingerprint_of(self.dataset)}


class _Rest:
    """A pass without its first batches."""

    def __init__(self, whole: BatchPass, skipped: int) -> None:
        self.whole = whole
        self._skipped = skipped
        self.first_batch = getattr(whole, "first_batch", 0) + skipped
        self.seed, self.epoch = whole.seed, whole.epoch

    def __len__(self) -> int:
        return max(0, len(self.whole) - self._skipped)

    def __iter__(self) -> Iterator[Batch]:
        return itertools.islice(self.whole, self._skipped, None)

    def state(self, count: int) -> State:
        return self.whole.state(self._skipped + count)

    def exhaust(self) -> None:
        """The pass was read to its end, or will be read no further."""
        exhaust(self.whole)


def base_seed_after(base_seed: int) -> int:
    """Base seed of the next pass of workers that outlive this one: torch draws one for all of them."""
    return mix(base_seed, 1) >> 1


def _endless() -> Iterator[Task]:
    while True:
        yield Task([], [])


def _without(tasks: Iterator[Task], numbers: frozenset[int]) -> Iterator[Task]:
    return (task for number, task in enumerate(tasks) if number not in numbers)


def _length(run: BatchPass) -> int:
    """Batches of a pass; 0 where nobody knows."""
    try:
        return len(run)
    except TypeError:
        return 0
