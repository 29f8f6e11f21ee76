"""`Consumer`: how far the program is that iterates a loader, and the state of the loader.

    plan -> reader -> epoch plan -> requests       state = cursor(batches delivered)
    streams: no plan, the dataset orders           state = position of each worker

Invariants: this is the only record of a loader's position. A state depends only on the batches that the consumer has
received, never on prefetched ones.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import IterableDataset

from penstock import distributed
from penstock.errors import ConfigError, StateError
from penstock.hashing import SAMPLES, derive_key, mix, mix_array
from penstock.loader.config import LoaderConfig
from penstock.loader.dataloader_iter import Progress
from penstock.loader.messages import BatchRequest
from penstock.loader.user_state import Snapshot, UserStates, take_snapshot
from penstock.plan.cursor import Cursor, State, check_state, checked_epoch, read_int, read_mapping
from penstock.plan.epoch import BatchEpochPlan, length_of
from penstock.plan.reader import Plan, PlanReader
from penstock.plan.share import ShareEpoch
from penstock.plan.stream import ResumableDataset, Stream, StreamPlan, UserEpochs, is_opened
from penstock.plan.user_states import has_state
from penstock.samplers.base import EpochBatchSampler
from penstock.samplers.batch import (
    RANKS,
    BatchSampler,
    batch_plan_of,
    layers,
    rank_splitter,
    why_not_computable,
)
from penstock.samplers.draws import DrawingSampler
from penstock.samplers.external import ExternalSampler
from penstock.samplers.identity import fingerprint_of, own_order
from penstock.samplers.sequential import SequentialSampler
from penstock.sources.batched import StreamDataset

if TYPE_CHECKING:
    from penstock.ledger.layouts import Layouts

__all__ = ["Consumer", "base_seed_after", "draws_as_it_is_read", "plan_of_batches"]


# Distinguishes seeds of workers from keys of samples.
_WORKERS = 0x776F726B

_EPOCHS = 1 << 62


class Consumer:
    """The program that iterates one loader: where it is, and where its next iterator begins.

    Args:
        dataset: the loader's dataset.
        plan: plan of its batches; None for streams that only the dataset can order.
        sampler: the sampler of single indices, if any.
        config: the loader's settings.
        batched: whether samples are collated.

    Attributes:
        samples: the map-style dataset, also inside one of our iterable ones.
        states: states of users' objects, by worker.
        is_split: whether a framework distributes finished batches to the ranks.
        last: contains the Penstock stream that the last iterator read in this process.
    """

    def __init__(
        self, dataset: Any, plan: EpochBatchSampler | None, sampler: Any, config: LoaderConfig, *, batched: bool
    ) -> None:
        self.dataset = dataset
        self.plan = plan
        self.batched = batched
        self.samples: Any = dataset.samples if isinstance(dataset, StreamDataset) else dataset
        self.states = self._new_states(config)
        self.is_split = False
        self.last: list[Stream] = []
        self._seed = config.seed
        self._layout: State = {"batch_size": config.batch_size, "drop_last": config.drop_last}
        self._warned = False
        # Epoch of the last iterator that delivered batches, for that warning.
        self._epoch_delivered: int | None = None
        self._reader: PlanReader[Any] | None = None
        """Reads the plan, or the epochs of a stream. The workers' states have the positions in streams. None while
        nobody counts the epochs of a user's stream.
        """
        if plan is not None:
            self._reader = PlanReader(plan, seed=config.seed)
        elif is_opened(dataset):
            self._reader = PlanReader(StreamPlan(dataset))
        self._progress: Progress | None = None
        # Base seed of the next iterator: loaded, or drawn for a state.
        self._base_seed: int | None = None
        self._ahead: frozenset[int] = frozenset()
        self._own = own_order(self.samples)
        """The dataset's own order, which identifies its rows in states."""
        self._counts = why_not_computable(plan, self.samples) is None
        self._job: Layouts | None = None
        """The layouts of the job's steps, if steps have numbers and a caller needs them."""
        own = None if isinstance(dataset, IterableDataset) else self._own
        reads_own = isinstance(sampler, SequentialSampler) and sampler.inner is not None
        self._under: PlanReader[ShareEpoch] | None = None if own is None or reads_own else PlanReader(own)
        """Reads the own order of a dataset on which a user's sampler operates."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_progress": None, "last": []}

    def _new_states(self, config: LoaderConfig) -> UserStates:
        stream, shared = self.plan is None, not config.forks_workers
        initial: Callable[[], Snapshot | None] | None = None
        if shared or (isinstance(self.samples, ResumableDataset) and self.samples.own_items):
            # Worker processes have copies, but such a dataset counts its epochs in shared memory.
            initial = partial(take_snapshot, self.samples, None, config.collate_fn if shared else None, first=True)
        single = config.kind == "inline" or (config.kind == "thread" and not stream)
        stateful = stream or has_state(self.samples) or has_state(config.collate_fn)
        workers, kept = 0 if single else config.workers, shared or config.persistent_workers
        return UserStates(workers, stream=stream, stateful=stateful, kept=kept, initial=initial)

    def change_workers(self, config: LoaderConfig) -> None:
        """Move the states of users' objects to the workers of a config.

        Raises:
            LayoutError: a loaded state does not fit their number.
        """
        states = self._new_states(config)
        self.states = states.load(self.states.state()) if self.states.resumes else states

    def follow(self, other: Consumer) -> None:
        """Start where another consumer's next iterator would start. Used for a copy of its loader, or a pickled one."""
        if other._reader is not None:
            self._reader = other._reader.over(UserEpochs(self.dataset) if self._reader is None else self._reader.plan)
        if self._under is not None and other._under is not None:
            self._under = other._under.over(self._under.plan)
        self._base_seed, self._ahead, self._job = other._base_seed, other._ahead, other._job
        self.is_split = other.is_split
        if other.states.resumes:
            self.states = self.states.load(other.states.state())

    @property
    def rank(self) -> int:
        """The rank whose share this is. Dataset or sampler may define another one than the process's."""
        rank = getattr(self.samples, "rank", None)
        if not isinstance(rank, int) and self.plan is not None:
            # A sampler without a world size has a rank, too.
            splitter = rank_splitter(self.plan.source, ranks=2)
            found = (getattr(splitter, name, None) for name in RANKS)
            rank = next((int(one) for one in found if isinstance(one, Integral)), None)
        return rank if isinstance(rank, int) else distributed.current().rank

    @property
    def seed(self) -> int | None:
        """Seed of the loader, or else of its sampler, from which order and samples follow; None without one."""
        return self._seed if self._seed is not None or self.plan is None else self.plan.key_seed

    @property
    def epoch(self) -> int:
        """The current epoch, or the next one if no iterator runs."""
        reader = self._reader
        if reader is None:
            return int(getattr(self.dataset, "epoch", 0))
        return reader.run.epoch if self.running and reader.run is not None else reader.epoch

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iterator. If it is the epoch of a state just loaded, the position is kept."""
        if self._reader is None:
            self._reader = self._count_epochs()
            if self.states.resumes:
                # The loaded state does not know its epoch.
                self._reader.choose(Cursor(epoch=checked_epoch(epoch)), loaded=True)
                return
        before = self.epoch
        if self._under is not None:
            self._under.set_epoch(epoch)
        self._reader.set_epoch(epoch if self.plan is not None else checked_epoch(epoch))
        if epoch != before:
            self._ahead = frozenset()

    def _count_epochs(self) -> PlanReader[Any]:
        """Return a reader of the epochs of a user's stream."""
        if not hasattr(self.dataset, "set_epoch"):
            raise ConfigError(
                f"{type(self.dataset).__name__} is iterable-style and has no set_epoch method: define one, or omit "
                "the call"
            )
        plan = UserEpochs(self.dataset)
        reader: PlanReader[Any] = PlanReader(plan)
        if self._progress is not None:
            # It began before anyone counted, in the epoch that the dataset had.
            plan.bookmark.write(Cursor(epoch=max(0, self.epoch)))
            reader.start(advance=False)
            self._progress.reader = reader
        return reader

    def skip_from_start(self, batches: int) -> None:
        """Start the next iterator after the first ``batches`` batches of its epoch, and drop a loaded position.

        The indices of those batches are drawn, but no samples are read. So users' objects keep a loaded state: it is
        the one after these batches. A stream without one of our plans cannot skip batches; its next iterator yields the
        whole epoch, and a loaded state is dropped.
        """
        states, ahead = self.states, frozenset(range(batches))
        if self.plan is None:
            states, ahead = states.load(None), frozenset()
        start = None if self._reader is None else Cursor(epoch=self._reader.epoch)
        self._go_on(start, None, states=states, ahead=ahead, base_seed=self._base_seed, job=self._job)

    def skip_batches(self, batches: int) -> None:
        """Leave out the next ``batches`` batches that the consumer has not received.

        Raises:
            ConfigError: the number is negative, the epoch has fewer batches left, or the dataset is a stream.
            LengthUnknownError: the number of batches is unknown.
        """
        if self.plan is None or self._reader is None:
            raise ConfigError("a stream cannot skip batches by their number: skip them in the training loop")
        (progress, job), running = self._present(), self.running
        assert progress.run is not None
        run, end, ahead = progress.run, progress.count, sorted(progress.ahead)
        left = length_of(run) - end - len(ahead)
        if not 0 <= batches <= left:
            raise ConfigError(f"epoch {run.epoch} has {left} batches left: skip takes 0 to {left}, got {batches}")
        rest = batches
        for number in ahead:
            if rest <= number - end:
                break
            # This batch was delivered before the ones on both sides of it, so it does not count.
            rest, end = rest - (number - end), number + 1
        end += rest
        # The rest is as from a state: users' objects, and the draws of the later batches, do not change.
        workers = self.states.state()
        self._go_on(
            run.cursor(end),
            None if self._under is None else self._under.cursor(0),
            states=self.states if workers is None else self.states.load(workers),
            ahead=frozenset(number - end for number in ahead if number >= end),
            base_seed=progress.base_seed if running else self._base_seed,
            job=job,
        )

    def _go_on(
        self,
        cursor: Cursor | None,
        under: Cursor | None,
        *,
        states: UserStates,
        ahead: frozenset[int],
        base_seed: int | None,
        job: Layouts | None,
    ) -> None:
        """Begin the next iterator at a position of which everything is checked: this cannot fail half-way."""
        if self._reader is not None and cursor is not None:
            self._reader.choose(cursor, loaded=True)
        if self._under is not None and under is not None:
            self._under.choose(under, loaded=True)
        self.states, self._ahead, self._base_seed, self._job = states, ahead, base_seed, job
        self._progress = self._epoch_delivered = None

    # Iteration.

    def continues(self, progress: Progress) -> bool:
        """Return whether an iterator continues, now that its consumer requests a batch.

        False if it has delivered nothing yet and another epoch was set since (Lightning sets it after ``iter()``): that
        epoch then starts in its place.
        """
        reader = self._reader
        if reader is None or self._progress is not progress or reader.run is None:
            return True
        return reader.continues(reader.run, delivered=progress.num_delivered > 0)

    @property
    def running(self) -> bool:
        """Whether an iterator runs: no other position was chosen since, or its consumer still holds it."""
        progress, reader = self._progress, self._reader
        if progress is None or reader is None:
            return progress is not None
        reader.follow()
        return reader.attached or (reader.requested and progress.num_delivered > 0 and progress.is_held())

    def base_seed(self, draw: Callable[[], int], *, workers: bool = False) -> int:
        """Return the base seed of the next iterator: the one of a loaded state, or one drawn once.

        With ``workers`` and a seed, the base seed of its workers: it follows from the seed and from where the iterator
        begins, so a resumed run has the same one.
        """
        if self._base_seed is None:
            self._base_seed = draw()
        if not workers or self._reader is None or (seed := self.seed) is None:
            return self._base_seed
        delivered = 0 if self._progress is None else self._progress.count
        start = self._reader.next_start(advance=self._advances, delivered=delivered)
        return mix(_WORKERS, seed, self.rank, start.epoch, start.consumed) >> 1

    @contextmanager
    def start(self, base_seed: int) -> Iterator[Progress]:
        """Start an epoch iterator: a context with its progress, in which the iterator is created.

        If that fails, the next iterator begins where this one would have.

        Args:
            base_seed: its base seed, from `base_seed`.
        """
        reader, before = self._reader, self._progress
        readers = [one for one in (reader, self._under) if one is not None]
        for one in readers:
            one.follow()  # a start uses up a loaded state of the bookmark
        own, positions = dict(vars(self)), [dict(vars(one)) for one in readers]
        try:
            self._base_seed = None
            if reader is not None and not reader.loaded:
                # They belong to an abandoned epoch.
                self._ahead = frozenset()
                if self.plan is None and self.states.resumes:
                    self.states = self.states.load(None)
            if self._under is not None:
                self._under.start(advance=self.seed is not None)
            run: Any = None
            if reader is not None:
                run = reader.start(advance=self._advances, delivered=0 if before is None else before.count)
            if self.plan is None:
                progress = Progress(None, base_seed)
            else:
                if before is not None and before.run is not None and before.num_delivered:
                    self._epoch_delivered = before.run.epoch
                if run.epoch == self._epoch_delivered and not self._warned:
                    self._warn_of_same_epoch()
                progress = Progress(run, base_seed, self._ahead)
                if self._job is not None:
                    self._job = _followed(self._job, run)
                order, plan, alone = self._own, self.plan, self._under is None
                if alone and order is not None and order.ahead is not None and isinstance(plan, BatchSampler):
                    advance, size = order.advance, plan.batch_size
                    progress.advance = lambda count: advance(run.place, count * size)
            progress.reader = reader
            self._progress, self._ahead = progress, frozenset()
            yield progress
        except BaseException:
            vars(self).update(own)
            for one, position in zip(readers, positions, strict=True):
                one.undo(position)
            raise

    def _present(self) -> tuple[Progress, Layouts | None]:
        """Return the progress of the running or else the next iterator, and the job's layouts until then."""
        progress, running = self._progress, self.running
        if self._job is None and self._counts:
            self._job = self._read_layouts({})
            if running and progress is not None and progress.run is not None:
                self._job = _followed(self._job, progress.run)
        if running and progress is not None and progress.run is not None:
            return progress, self._job
        assert self._reader is not None
        run = self._reader.peek()
        return Progress(run, 0, self._ahead), None if self._job is None else _followed(self._job, run)

    def requests(self, progress: Progress) -> Iterator[Iterable[BatchRequest]]:
        """Yield the requests of an epoch iterator in blocks, because several batches cost little more than one."""
        run, under = progress.run, None if self._under is None else self._under.run
        if run is None:  # only the workers know the samples of a stream
            yield (BatchRequest([], []) for _ in itertools.repeat(None))
            return
        seed = self._seed if self._seed is not None else run.seed
        seed = progress.base_seed if seed is None else seed
        # Positions of a single rank are other samples on other ranks, so the rank is part of the key.
        seed = mix(seed, self.rank) if run.per_rank or under is not None else seed
        # torch's samplers accept negative epochs, but keys are hashes of non-negative numbers.
        key = derive_key(seed, run.epoch % _EPOCHS, SAMPLES)
        without, numbers = progress.delivered_before, itertools.count()
        for rows, positions in run.blocks():
            # The position to send to workers. It may still change for batches that are not planned yet.
            place = run.place if under is None else under.place
            # Bytes are cheaper to send than rows of arrays.
            packed = rows if isinstance(rows, list) else map(np.ndarray.tobytes, rows)
            keys = map(np.ndarray.tobytes, mix_array(key, positions.view(np.uint64)))
            requests = map(BatchRequest, packed, keys, itertools.repeat(place))
            yield (one for one in requests if next(numbers) not in without) if without else requests

    def finished(self, progress: Progress) -> None:
        """Record that the consumer has received the whole epoch. With a seed, the next iterator advances the epoch."""
        # A request during the iteration for its own epoch changes nothing.
        self.continues(progress)
        if self._progress is progress and (progress.run is None or progress.count >= _length(progress.run)):
            self._progress, self._epoch_delivered = None, None if progress.run is None else progress.run.epoch
            self.states.finish()
            if self._under is not None:
                self._under.finish(advance=self.seed is not None)
            if self._reader is not None:
                self._reader.finish(advance=self._advances, delivered=progress.count)

    @property
    def _advances(self) -> bool:
        """Whether the next epoch follows by itself. Streams are not read again."""
        return self.plan is None or (self.seed is not None and self.plan.bookmark.advances)

    def _warn_of_same_epoch(self) -> None:
        """Warn once if a sampler whose epoch the user sets starts the same seeded epoch again."""
        assert self.plan is not None
        if self._seed is None or self.plan.bookmark.advances:
            return
        samplers = list(layers(self.plan.source))
        if all(getattr(sampler, "shuffle", True) for sampler in samplers):
            self._warned = True
            name = type(samplers[-1]).__name__
            warnings.warn(
                f"epoch {self._epoch_delivered} of this {name} starts a second time, with the same order and the same "
                "draws: call its set_epoch(epoch) before each epoch, as without seed=",
                stacklevel=5,
            )

    @property
    def num_delivered(self) -> int:
        """Number of batches delivered by the running iterator; 0 if none runs."""
        return self._progress.count if self._progress is not None and self.running else 0

    # Access to the plan for other modules.

    def peek(self) -> BatchEpochPlan:
        """Return the batches of the running or else the next iterator, without starting it."""
        run = self._present()[0].run
        assert run is not None
        return run

    def preview(self) -> BatchEpochPlan:
        """Return the batches of the next iterator without side effects: its random draws are still to come."""
        assert self._reader is not None
        run: BatchEpochPlan = self._reader.preview()
        return run

    def whole(self) -> BatchEpochPlan:
        """Return all batches of the current or next epoch."""
        assert self._reader is not None
        whole: BatchEpochPlan = self._reader.whole()
        return whole

    def _read_layouts(self, state: Mapping[str, Any]) -> Layouts:
        """Return the layouts in a state."""
        # Imported only when needed: few loaders create a state before their first batch.
        from penstock.ledger.layouts import Layouts

        return Layouts.read(state, 1 if self._own is None else self._own.mini_epochs)

    # State.

    def state_dict(self) -> State:
        """Return the entries of `DataLoader.state_dict`."""
        progress, known = self._progress, True
        state = self._identity()
        if self.plan is None:
            state.update(self._layout)
            if (reader := self._reader) is not None:
                running = self.running
                opening = reader.run if running and reader.run is not None else reader.peek()
                state["stream"] = opening.state()
                known = running or reader.loaded or self.states.over
        else:
            here, job = self._present()
            assert here.run is not None
            state["sampler"] = here.run.cursor(here.count).state()
            if here.ahead:
                # Numbers relative to the first gap. They are valid for this rank and batch size only.
                state["ahead"] = sorted(number - here.count for number in here.ahead)
                state |= {"world": list(distributed.current()), "batch_size": self._layout["batch_size"]}
            if job is not None:
                state.update(job.state(here.count))
        if self._under is not None:
            state["dataset"] = self._under.cursor(0).state()
        if self.seed is None:
            base_seed = progress.base_seed if progress is not None and self.running else self._base_seed
            if base_seed is not None:
                state["base_seed"] = base_seed
        # After an iterator that was left for another epoch, only its workers know where they are.
        if known and (workers := self.states.state()) is not None:
            state["workers"] = workers
        return state

    def load_state_dict(self, state: Mapping[str, Any], *, allow_growth: bool = False) -> None:
        """Resume from entries, see `DataLoader.load_state_dict`."""
        of = "DataLoader"
        if allow_growth and (self.plan is None or self._under is not None or self._own is None):
            raise ConfigError("allow_growth needs a dataset with its own order, such as RankDataset or MPDataset")
        self.check(state)
        reader, under = self._reader, None
        cursor: Cursor | None = None
        entry = "sampler"
        if self.plan is None:
            check_state(state, self._layout, of=of)
            entry = "stream"
            if reader is None and entry in state:
                reader = self._count_epochs()
        if allow_growth and self._own is not None:
            cursor = self._own.read(read_mapping(state, entry, of=of), allow_growth=True)
        elif reader is not None and isinstance(reader.plan, UserEpochs) and entry not in state:
            cursor = Cursor(epoch=reader.epoch)  # nobody had set an epoch
        elif reader is not None:
            cursor = reader.plan.read(read_mapping(state, entry, of=of))
        if self._under is not None:
            under = self._under.plan.read(read_mapping(state, "dataset", of=of))
        ahead = self._read_ahead(state)
        base_seed = read_int(state, "base_seed", of=of, below=1 << 63) if "base_seed" in state else None
        if self.seed is not None and cursor is not None and cursor.consumed:
            # The iterator drew when it started. A generator saved with this state has advanced beyond that.
            base_seed = 0
        states = self.states.load(state.get("workers"))
        job = self._read_layouts(state) if self._counts else None
        self._reader = reader
        self._go_on(cursor, under, states=states, ahead=ahead, base_seed=base_seed, job=job)

    def check(self, state: Mapping[str, Any]) -> None:
        """Refuse the state of a loader with another seed or other data.

        Raises:
            StateError: the state belongs to such a loader.
        """
        check_state(state, self._identity(), of="DataLoader")

    def _read_ahead(self, state: Mapping[str, Any]) -> frozenset[int]:
        if self.plan is None or not state.get("ahead"):
            return frozenset()
        size = {"batch_size": self._layout["batch_size"]} if "batch_size" in state else {}
        check_state(state, {"world": list(distributed.current()), **size}, of="DataLoader with in_order=False")
        numbers = state["ahead"]
        if not isinstance(numbers, list) or not all(type(number) is int and number > 0 for number in numbers):
            raise StateError(
                f"the state of this DataLoader is damaged: ahead is {numbers!r}, not a list of batch numbers"
            )
        return frozenset(numbers)

    def _identity(self) -> State:
        if self._own is not None:
            return {"seed": self._seed}
        return {"seed": self._seed, "fingerprint": fingerprint_of(self.dataset)}


def base_seed_after(base_seed: int) -> int:
    """Return the base seed of the next iterator of persistent workers. torch draws one for all of them."""
    return mix(base_seed, 1) >> 1


def _followed(job: Layouts, run: BatchEpochPlan) -> Layouts:
    """Return a job's layouts until an epoch plan starts."""
    layout = run.layout
    return job if layout is None else job.followed(layout)


def _length(run: BatchEpochPlan) -> int:
    """Return the number of batches of an epoch plan; 0 if it is unknown."""
    try:
        return len(run)
    except TypeError:
        return 0


def plan_of_batches(loader: Any) -> EpochBatchSampler | None:
    """Return the plan of a loader's batches; None for an iterable dataset that only the dataset can order.

    Raises:
        ConfigError: the batch sizes of the loader and of a dataset that makes batches, such as `MPDataset`, differ.
    """
    dataset = loader.dataset
    if isinstance(dataset, StreamDataset):
        size = dataset.batch_size
        if loader.batch_size != size:
            raise ConfigError(
                f"the loader's batch_size is {loader.batch_size} and the dataset's is {size}: pass equal sizes, "
                "because the dataset assigns whole batches to workers"
            )
        return BatchSampler(SequentialSampler(dataset.samples), size, loader.drop_last or dataset.drop_last)
    if isinstance(dataset, IterableDataset):
        return None
    if loader.batch_sampler is None:
        return BatchSampler(loader.sampler, 1, False)
    return batch_plan_of(loader.batch_sampler)


def draws_as_it_is_read(plan: Plan[Any] | None) -> bool:
    """Return whether reading a plan of batches moves a generator that others may draw from.

    A sampler with a generator does, and one of another library may. It must be read ahead exactly as far as torch does.
    """
    while (inner := getattr(plan, "inner", None)) is not None:
        plan = inner
    if isinstance(plan, ExternalSampler):
        return not isinstance(plan.items, Sequence)
    return isinstance(plan, DrawingSampler) and plan.generator is not None and not plan.at_once
