"""What all samplers share: the pass, and three verbs (`set_epoch`, `state_dict`, `load_state_dict`).

A *pass* is one run over a sampler's indices, from wherever it begins, as a pure function of how many samples have been
had: ``indices(start, stop)``, ``positions(start, stop)`` and ``state(count)``. A loader that prefetches asks the pass
for the state at the sample that its *consumer* has reached; nothing is counted twice, and nothing is replayed.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, Protocol, TypeVar

from torch.utils.data import Sampler

from penstock.errors import SamplerError
from penstock.order.permutation import MAX_N, Indices
from penstock.state import State

__all__ = [
    "Batch",
    "BatchPass",
    "EpochBatchSampler",
    "EpochSampler",
    "Epochs",
    "NestedBatchSampler",
    "Pass",
    "exhaust",
    "iterate",
    "limit",
]

_FIRST_CHUNK = 256  # the first index comes at once; later chunks are large enough to cost nothing per index
_LARGEST_CHUNK = 16384


class Pass(Protocol):
    """One run over the indices of a sampler or data set; immutable.

    ``positions`` are global ordinals within the epoch, over all ranks: with ``seed`` and ``epoch`` they make the key of
    a sample's generator. ``seed`` is None where the sampler has none; then the loader supplies it.
    """

    seed: int | None
    epoch: int

    def __len__(self) -> int: ...
    def indices(self, start: int, stop: int) -> Indices:
        """Indices of the samples ``start`` to ``stop`` of this pass: int64 of shape (stop - start,)."""
        ...

    def positions(self, start: int, stop: int) -> Indices:
        """Their global positions: int64 of shape (stop - start,)."""
        ...

    def state(self, count: int) -> State:
        """The state of a consumer that has had the first ``count`` samples of this pass."""
        ...


class BatchPass(Protocol):
    """One run over the batches of a sampler; ``seed`` and ``epoch`` as in `Pass`.

    Iterating gives ``(indices, positions)``: a list of sample indices, and the int64 array of their global positions
    (None where a foreign sampler knows of none).
    """

    seed: int | None
    epoch: int

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Batch]: ...
    def state(self, count: int) -> State:
        """The state of a consumer that has had the first ``count`` batches of this pass."""
        ...


Batch = tuple[list[Any], Indices | None]
P = TypeVar("P", Pass, BatchPass)
T = TypeVar("T")


class Epochs(Sampler[T], Generic[T, P], abc.ABC):
    """Keeps the place of a sampler: epoch, the pass that runs, the state that waits to be resumed.

    Subclasses implement `_build` (a pass, from a loaded state or from the start of the epoch; it must do no work before
    it is iterated) and `_check` (refuse a state of something else, else return it). Length and state are exact at any
    time: ``len(sampler)`` is what the running pass, or else the next one, yields.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.yielded = 0
        self._resume: State | None = None
        self._pass: P | None = None

    @abc.abstractmethod
    def _build(self, resume: State | None) -> P: ...

    @abc.abstractmethod
    def _check(self, state: Mapping[str, Any]) -> State: ...

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass. The epoch of a state just loaded keeps its position.

        Raises:
            SamplerError: a negative epoch.
        """
        if epoch < 0:
            raise SamplerError(f"epoch must be 0 or more, got {epoch}")
        if epoch == self.epoch and self._resume is not None:
            return
        self.epoch, self.yielded, self._resume, self._pass = epoch, 0, None, None

    def peek(self) -> P:
        """The pass that `start` would begin."""
        return self._build(self._resume)

    def whole(self) -> P:
        """A pass over the whole epoch, whatever state was loaded; nothing begins."""
        return self._build(None)

    def start(self) -> P:
        """Begin a pass. A loaded state is used once; the next pass of the same epoch is a whole one."""
        self._pass = self.peek()
        self._resume, self.yielded = None, 0
        return self._pass

    def finish(self) -> None:
        """The pass that runs has been had to its end: the next one is whole, and of the same epoch."""
        self._pass, self._resume, self.yielded = None, None, 0

    def advance(self) -> None:
        """Go on to what comes after the pass that runs, or would run: the next epoch."""
        self.set_epoch(self.epoch + 1)

    @property
    def running(self) -> bool:
        """Whether a pass has begun since the epoch was set or a state loaded."""
        return self._pass is not None

    def resume(self, run: P) -> None:
        """The pass that ran before its epoch was set once more goes on after all; nothing if another was chosen."""
        if self._pass is None and self._resume is None and run.epoch == self.epoch:
            self._pass = run

    def _current(self) -> P:
        return self.peek() if self._pass is None else self._pass

    def __len__(self) -> int:
        return len(self._current())

    def __getstate__(self) -> dict[str, Any]:
        # A pass belongs to the iterator that walks it, and iterators do not travel: as with the original, the next
        # iter() of a copy is a whole pass, or goes on from a state that was loaded and not used yet.
        return {**self.__dict__, "_pass": None, "yielded": 0}

    def state_dict(self) -> State:
        """Where the iterator that was made last has got to: a few integers, JSON-serialisable."""
        return self._current().state(self.yielded)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state at the next ``iter()``, in its epoch.

        Raises:
            StateError: the state belongs to other data or to another order.
        """
        checked = self._check(state)
        self._resume, self._pass, self.yielded = checked, None, 0
        self.epoch = int(checked["epoch"])


class EpochSampler(Epochs[int, Pass]):
    """Base of the samplers that yield indices."""

    def __iter__(self) -> Iterator[int]:
        for index in iterate(self.start()):
            self.yielded += 1
            yield index


class EpochBatchSampler(Epochs[list[int], BatchPass]):
    """Base of the samplers that yield lists of indices."""

    def __iter__(self) -> Iterator[list[int]]:
        for indices, _ in self.start():
            self.yielded += 1
            yield indices


class NestedBatchSampler(EpochBatchSampler):
    """Base of the batch samplers that have a ``sampler`` inside, one of ours or any iterable: both move together."""

    sampler: Iterable[Any]

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass, of the sampler inside too."""
        super().set_epoch(epoch)
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def finish(self) -> None:
        """The pass that runs has been had to its end: the next one is whole, and of the same epoch."""
        super().finish()
        if isinstance(self.sampler, EpochSampler):
            self.sampler.finish()

    def advance(self) -> None:
        """Go on to what comes after this pass, as the sampler inside understands it."""
        if isinstance(self.sampler, EpochSampler):
            self.sampler.advance()
            self.finish()
            self.epoch = self.sampler.epoch
        else:
            super().advance()

    @property
    def running(self) -> bool:
        """Whether a pass has begun since the epoch was set or a state loaded, here or on the sampler inside."""
        return super().running and (not isinstance(self.sampler, EpochSampler) or self.sampler.running)

    def _current(self) -> BatchPass:
        if isinstance(self.sampler, EpochSampler) and not self.sampler.running:
            self._pass, self.yielded = None, 0  # somebody called the sampler's own set_epoch or load_state_dict
        return super()._current()


def iterate(run: Pass) -> Iterator[int]:
    """The indices of a pass as Python ints, computed in growing chunks."""
    begin, chunk, end = 0, _FIRST_CHUNK, limit(run)
    while begin < end:
        yield from run.indices(begin, min(begin + chunk, end)).tolist()
        begin, chunk = begin + chunk, min(chunk * 4, _LARGEST_CHUNK)
    exhaust(run)


def exhaust(run: Any) -> None:
    """Tell a pass that it was read to its end, indices or not: what draws from a generator moves that on to the end."""
    if hasattr(run, "exhaust"):
        run.exhaust()


def limit(run: Pass) -> int:
    """How many samples a pass has, or 2**62 where it is endless (and ``len`` is a TypeError)."""
    try:
        return len(run)
    except TypeError:
        return MAX_N
