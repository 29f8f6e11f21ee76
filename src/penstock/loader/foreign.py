"""Samplers that are not ours, as a source of batches: any iterable of indices or of lists of them.

A state is what it takes to draw the rest of the pass again in another process:

* with ``state_dict`` and ``load_state_dict``, on the sampler or on its iterator: what they say after each batch that
  was drawn, kept until the consumer has passed by;
* otherwise a count of batches. They are drawn again and dropped, under the generators that the pass began with: the
  sampler's own ``generator``, and of the global ones those that drawing the first batch moved. The global ones are the
  caller's, and stand afterwards where they stood.

Size: 7 kB of text for torch's generators, whatever the user's states take, else a few numbers.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, cast

from torch.utils.data import BatchSampler as TorchBatchSampler
from torch.utils.data import DistributedSampler as TorchDistributedSampler
from torch.utils.data import RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler

from penstock.errors import StateError
from penstock.loader.generators import generator_states, own_generators, put_back, set_generators, text_of
from penstock.loader.snapshots import Frozen, Resume, Snapshots, freeze, reopen_states, states_of
from penstock.loader.stateful import Trail
from penstock.samplers.base import Batch, BatchPass, EpochBatchSampler, EpochSampler
from penstock.samplers.batch import BatchSampler
from penstock.state import STATE_VERSION, State, check_state, read_int

__all__ = ["Foreign", "draws_late", "source_of"]

_OF = "batch sampler"
_KEPT = 128  # snapshots of what was drawn ahead; behind the oldest one batches are drawn again from the beginning
_FIXED = (SequentialSampler, TorchDistributedSampler)  # draw from no generator that others share
_AT_ONCE = (SubsetRandomSampler, WeightedRandomSampler)  # draw everything at the beginning
_REPEAT = (*_FIXED, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


def source_of(batches: Iterable[Any]) -> EpochBatchSampler:
    """A batch sampler as a source of batches with a state: ours as they are, others wrapped."""
    if type(batches) is TorchBatchSampler and isinstance(batches.sampler, EpochSampler):
        return BatchSampler(batches.sampler, batches.batch_size, batches.drop_last)
    if isinstance(batches, EpochBatchSampler) and (
        type(batches) is not BatchSampler or isinstance(batches.sampler, EpochSampler)
    ):
        return batches
    return Foreign(batches)


def draws_late(source: EpochBatchSampler | None) -> bool:
    """Whether planning batches moves a generator that others may draw from, so that how many are planned ahead shows:
    it has to be as many as torch plans then.
    """
    items = source.items if isinstance(source, Foreign) else getattr(source, "sampler", None)
    if getattr(items, "generator", None) is not None and type(items) not in _AT_ONCE:
        return True
    return isinstance(source, Foreign) and source.draws and type(items) not in (RandomSampler, *_AT_ONCE)


class Foreign(EpochBatchSampler):
    """Any iterable of lists of indices. A plain `BatchSampler`, torch's or ours, is looked through: its sampler is what
    has a state.
    """

    def __init__(self, batches: Iterable[Any]) -> None:
        super().__init__()
        self.batch_sampler = batches
        self.items: Iterable[Any] = batches
        self.size: int | None = None
        self.drop_last = False
        if type(batches) in (TorchBatchSampler, BatchSampler):
            plain = cast(BatchSampler, batches)
            self.items, self.size, self.drop_last = plain.sampler, plain.batch_size, plain.drop_last
        self.trail: Trail | None = None
        """Where ``items`` stands: what was drawn, which may be more than the consumer has had."""

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass, of the sampler too."""
        super().set_epoch(epoch)
        if hasattr(self.items, "set_epoch"):
            self.items.set_epoch(epoch)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state at the next ``iter()``; the sampler's ``set_epoch`` is told the epoch that it had.

        Raises:
            StateError: the state is damaged.
        """
        super().load_state_dict(state)
        if "sampler_epoch" in state and hasattr(self.items, "set_epoch"):
            self.items.set_epoch(state["sampler_epoch"])

    def _build(self, resume: State | None) -> BatchPass:
        return _ForeignPass(self, resume)

    def _check(self, state: Mapping[str, Any]) -> State:
        check_state(state, {"version": STATE_VERSION}, of=_OF)
        for name in ("epoch", "batches"):
            read_int(state, name, of=_OF)
        if "sampler_epoch" in state:
            read_int(state, "sampler_epoch", of=_OF)
        if "sampler" in state:
            Trail.of(state["sampler"], of=_OF)
        if not isinstance(state.get("generators", {}), Mapping) or not isinstance(state.get("own", []), list):
            raise StateError(f"the generators in this state of a {_OF} are damaged: resume from another state")
        return copy.deepcopy(dict(state))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "trail": None}

    def epoch_of_items(self) -> State:
        """The epoch that the sampler says it is in, as an entry of a state."""
        epoch = getattr(self.items, "epoch", None)
        return {"sampler_epoch": epoch} if type(epoch) is int and hasattr(self.items, "set_epoch") else {}

    def begun(self) -> Trail:
        """The trail of a pass that begins now."""
        trail = Trail(_snapshot(self.items, None)) if self.trail is None else self.trail.after(0)
        trail.begin()
        return trail

    @property
    def draws(self) -> bool:
        """Whether the order may come from the global generators."""
        return not isinstance(self.items, Sequence) and type(self.items) not in _FIXED


def _snapshot(items: Any, iterator: Any) -> Frozen | None:
    states = states_of(sampler=items, iterator=iterator)
    return freeze(states) if states else None


class _Walk:
    """A sampler that is being iterated, batch by batch."""

    def __init__(self, source: Foreign, enter: Callable[[], None]) -> None:
        self._source = source
        self._enter = enter
        self.iterator: Iterator[Any] = iter(())
        self.short = False

    def begin(self, earlier: int) -> Iterator[Any]:
        """``iter(sampler)``; for the pass that is wanted (0 earlier) under its generators."""
        if not earlier:
            self._enter()
        self.iterator = iter(self._source.items)
        self.short = False
        return self.iterator

    def draw(self) -> list[Any]:
        """The next batch; StopIteration behind the last."""
        size = self._source.size
        if size is None:
            return list(next(self.iterator))
        batch = [] if self.short else list(itertools.islice(self.iterator, size))
        self.short = len(batch) < size
        if not batch or (self.short and self._source.drop_last):
            raise StopIteration
        return batch


class _ForeignPass:
    seed: int | None = None

    def __init__(self, source: Foreign, resume: State | None) -> None:
        self._source = source
        self._resume = resume
        self._trail: Trail | None = None
        self._marks: deque[tuple[int, Frozen]] = deque(maxlen=_KEPT)
        self._generators: State | None = None
        self._epoch: State | None = None
        self.epoch = source.epoch
        self.first_batch = 0 if resume is None else int(resume["batches"])

    def __len__(self) -> int:
        source = self._source
        count = len(cast(Sized, source.items))
        if source.size is not None:
            count = count // source.size if source.drop_last else -(-count // source.size)
        return max(0, count - self.first_batch)

    def __iter__(self) -> Iterator[Batch]:
        source, resume = self._source, self._resume
        begun = self._trail = self._where_it_begins()
        source.trail = trail = begun.after(0)
        self._epoch = source.epoch_of_items()
        self._marks.clear()
        self._warn()
        snapshots = Snapshots()
        walk = _Walk(source, self._enter)
        before = generator_states() if source.draws or resume is not None else {}
        recorded = {} if resume is None else resume.get("generators", {})
        try:
            if resume is None:
                walk.begin(0)
            else:
                reopen_states(Resume(begun.snapshot, begun.since), walk.begin, walk.draw, sampler=source.items)
            batch = _next(walk)
            self._keep_what_moved()
        finally:
            set_generators({name: before[name] for name in recorded if name in before})
        number = 0
        while batch is not None:
            number += 1
            frozen = snapshots.when_due(lambda: _snapshot(source.items, walk.iterator), ended=walk.short)
            trail.step(frozen)
            if frozen is not None:
                self._marks.append((number, frozen))
            yield batch, None
            batch = _next(walk)

    def state(self, count: int) -> State:
        trail = self._trail or self._where_it_begins()
        drawn = next((mark for mark in reversed(self._marks) if mark[0] <= count), None)
        if drawn is not None:
            trail = Trail(drawn[1], [count - drawn[0]])
        else:
            trail = trail.after(count)
        return {
            "version": STATE_VERSION,
            "epoch": self.epoch,
            "batches": self.first_batch + count,
            **(self._source.epoch_of_items() if self._epoch is None else self._epoch),
            **({} if trail.snapshot is None else {"sampler": trail.state()}),
            **self._generators_of_state(),
        }

    def _where_it_begins(self) -> Trail:
        if self._resume is None:
            return self._source.begun()
        if "sampler" in self._resume:
            return Trail.of(self._resume["sampler"], of=_OF)
        return Trail(None, [self.first_batch] if self.first_batch else [])

    def _enter(self) -> None:
        """The generators of the beginning: put there those of a state, else note what they are."""
        owns = own_generators(self._source.batch_sampler)
        if self._resume is None:
            self._generators = self._now()
        else:
            self._generators = {name: self._resume[name] for name in ("generators", "own") if name in self._resume}
        set_generators(self._generators.get("generators", {}))
        for generator, text in zip(owns, self._generators.get("own", ()), strict=False):
            put_back(generator, text)

    def _keep_what_moved(self) -> None:
        assert self._generators is not None
        then = self._generators.pop("generators", {})
        now = generator_states() if then else {}
        moved = {name: state for name, state in then.items() if state != now[name]}
        if moved:
            self._generators["generators"] = moved

    def _now(self) -> State:
        own = [text_of(generator) for generator in own_generators(self._source.batch_sampler)]
        return {**({"generators": generator_states()} if self._source.draws else {}), **({"own": own} if own else {})}

    def _generators_of_state(self) -> State:
        if self._generators is not None:
            return copy.deepcopy(self._generators)
        if self._resume is None:
            return self._now()
        return {name: copy.deepcopy(self._resume[name]) for name in ("generators", "own") if name in self._resume}

    def _warn(self) -> None:
        """Say that something is skipped, unless it is known to repeat."""
        items = self._source.items
        begun = cast(Trail, self._trail)
        if (
            self.first_batch
            and begun.snapshot is None
            and not isinstance(items, Sequence)
            and type(items) not in _REPEAT
        ):
            warnings.warn(
                f"{type(items).__name__} has no state_dict and load_state_dict: its first {self.first_batch} batches "
                "are drawn again and dropped, which is exact only if it repeats its order",
                stacklevel=2,
            )


def _next(walk: _Walk) -> list[Any] | None:
    try:
        return walk.draw()
    except StopIteration:
        return None
