"""`IterationBasedBatchSampler`: a given number of batches, pass after pass over a batch sampler."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, NamedTuple, cast

from penstock.errors import SamplerError, StateError
from penstock.samplers.base import Batch, BatchPass, EpochBatchSampler, exhaust
from penstock.state import STATE_VERSION, State, check_state, read_int

__all__ = ["IterationBasedBatchSampler"]

_PASS_SHIFT = 40
_PASSES = 1 << 22
"""Positions of pass j are moved by ``j << 40``, so that no two samples share a generator (up to 1e12 samples)."""
_LAG = 4096  # how far, in batches, a consumer may be behind the iterator and still ask for its state
_EMPTY_PASSES = 100


class IterationBasedBatchSampler(EpochBatchSampler):
    """The batches of a batch sampler, from iteration ``start_iter`` up to ``num_iterations``.

    Args:
        batch_sampler: one of ours, or any with a length.
        num_iterations: iterations of the whole training.
        start_iter: where to begin, 0 to num_iterations.

    Raises:
        SamplerError: numbers outside their range, or a batch sampler without a length.

    Iteration i is batch ``i % len`` of pass ``i // len``, and pass j is epoch ``base + j`` of the batch sampler (its
    ``set_epoch`` is called where it has one); ``base`` is 0 unless `set_epoch` says otherwise. So the sequence goes on
    exactly after a restart, by ``start_iter`` alone or by `load_state_dict`, where the batches are a function of (seed,
    epoch); earlier passes are not walked. Samplers that draw from a ``generator`` need `load_state_dict`. Those that
    draw from torch's global generator (``RandomSampler(shuffle=True)`` without one) end the pass in progress exactly
    by it, and draw later passes anew; foreign batch samplers go on exactly if they repeat their order. Where the
    lengths of passes differ (groups over draws with replacement), ``start_iter`` counts every pass before it.

    ``len`` is what is yielded: ``num_iterations - start_iter``, or 0 over an empty batch sampler.

    The state is elastic where the batch sampler's is. Iterations stay counted per step: on other ranks the epoch in
    progress is dealt out again as the batch sampler does that, takes more or fewer iterations than before, and the run
    still ends at ``num_iterations``.

    >>> from penstock.samplers import BatchSampler, SequentialSampler
    >>> batches = BatchSampler(SequentialSampler(range(5)), 2, drop_last=False)
    >>> list(IterationBasedBatchSampler(batches, 5, start_iter=1))
    [[2, 3], [4], [0, 1], [2, 3]]
    """

    def __init__(self, batch_sampler: Iterable[list[Any]], num_iterations: int, start_iter: int = 0) -> None:
        super().__init__()
        if not isinstance(num_iterations, int) or num_iterations < 0:
            raise SamplerError(f"num_iterations must be an integer of 0 or more, got {num_iterations!r}")
        if not isinstance(start_iter, int) or not 0 <= start_iter <= num_iterations:
            raise SamplerError(
                f"start_iter must be an integer from 0 to num_iterations={num_iterations}, got {start_iter}"
            )
        if not hasattr(batch_sampler, "__len__"):
            raise SamplerError(f"iterations are found by arithmetic: a {type(batch_sampler).__name__} has no length")
        self.batch_sampler = batch_sampler
        self.num_iterations = num_iterations
        self.start_iter = start_iter

    @property
    def batch_size(self) -> int | None:
        """Of the batch sampler, if it has one."""
        size: int | None = getattr(self.batch_sampler, "batch_size", None)
        return size

    def advance(self) -> None:
        """Go on to the epoch after the last one of this run."""
        run = self._current()
        assert isinstance(run, _Iterations)
        self.set_epoch(run.last_epoch + 1)

    def _build(self, resume: State | None) -> BatchPass:
        return _Iterations(self.batch_sampler, self.num_iterations, self.start_iter, self.epoch, resume)

    def _check(self, state: Mapping[str, Any]) -> State:
        of = "IterationBasedBatchSampler"
        expected = {"version": STATE_VERSION, "batches": "iterations", "num_iterations": self.num_iterations}
        check_state(state, expected, of=of)
        for name in ("epoch", "iteration", "pass"):
            read_int(state, name, of=of)
        if state["iteration"] > self.num_iterations:
            raise StateError(
                f"this state of an {of} is damaged: it stands behind iteration {state['iteration']} of "
                f"{self.num_iterations}. Resume from another state, or start anew without one"
            )
        inner = state.get("batch_sampler")
        if not isinstance(inner, Mapping):
            raise StateError(f"the state of an {of} holds its batch sampler's, got {inner!r}")
        if isinstance(self.batch_sampler, EpochBatchSampler):
            self.batch_sampler.load_state_dict(inner)
        else:
            check_state(inner, {"type": type(self.batch_sampler).__name__}, of=of)
            read_int(inner, "yielded", of=of)
        return dict(state)


class _Leg(NamedTuple):
    """One pass over the batch sampler, as part of a run."""

    first: int
    """Batches of the run before it."""
    number: int
    run: BatchPass


class _Iterations:
    """Pass after pass. A pass that has begun is kept as long as its consumer may ask for a state in it."""

    def __init__(
        self, sampler: Iterable[list[Any]], num_iterations: int, start: int, base: int, resume: State | None
    ) -> None:
        self._sampler = sampler
        self._num_iterations = num_iterations
        self._base = base
        self._resume = resume
        self._start = start if resume is None else int(resume["iteration"])
        self._legs: deque[_Leg] = deque()
        self.epoch = base
        self.seed: int | None = getattr(sampler, "seed", None)
        if isinstance(sampler, EpochBatchSampler):
            self.seed = sampler.peek().seed

    @property
    def last_epoch(self) -> int:
        """The epoch of the pass that was begun last."""
        return self._base + (self._legs[-1].number if self._legs else 0)

    def __len__(self) -> int:
        left = max(0, self._num_iterations - self._start)
        return left if left and self._length(0) else 0

    def __iter__(self) -> Iterator[Batch]:
        done, left, empty = 0, len(self), 0
        self._legs.clear()
        number, run = self._first() if left or self._resume is not None else (0, None)
        if run is not None and not left:
            exhaust(run)  # resumed at its very end
            return
        while run is not None:
            self._legs.append(_Leg(done, number, run))
            while len(self._legs) > 1 and self._legs[1].first < done - _LAG:
                self._legs.popleft()
            before = done
            for indices, positions in run:
                done += 1
                yield indices, None if positions is None else positions + (number % _PASSES << _PASS_SHIFT)
                if done == left:
                    exhaust(run)
                    return  # nothing is prepared beyond the last iteration
            empty = empty + 1 if done == before else 0
            if empty > _EMPTY_PASSES:
                raise SamplerError(f"{empty} passes over the batch sampler in a row gave no batch")
            number += 1
            run = self._begin(number, 0)

    def state(self, count: int) -> State:
        head = {"version": STATE_VERSION, "batches": "iterations", "num_iterations": self._num_iterations}
        head |= {"epoch": self._base, "iteration": self._start + count}
        if count == 0 and self._resume is not None:
            return {**self._resume}
        if count == 0 and not self._legs:
            number, skip = self._locate()
            return {**head, "pass": number, "batch_sampler": self._whole(number).state(skip)}
        # At the seam of two passes the earlier one counts, whether or not the later one was begun already.
        leg = next((leg for leg in reversed(self._legs) if leg.first < max(count, 1)), None)
        if leg is None:
            raise SamplerError(
                f"the state after {count} batches was asked for, but this iterator "
                + (f"is more than {_LAG} batches ahead of it" if self._legs else "has not been started")
            )
        return {**head, "pass": leg.number, "batch_sampler": leg.run.state(count - leg.first)}

    def _first(self) -> tuple[int, BatchPass]:
        if self._resume is None:
            number, skip = self._locate()
            return number, self._begin(number, skip)
        number, inner = int(self._resume["pass"]), self._resume["batch_sampler"]
        if isinstance(self._sampler, EpochBatchSampler):
            self._sampler.load_state_dict(inner)
            return number, self._sampler.start()
        return number, self._begin(number, int(inner["yielded"]))

    def _locate(self) -> tuple[int, int]:
        """Pass and batch of the first iteration."""
        if self._start == 0 or self._length(0) == 0:
            return 0, 0
        if not getattr(self._sampler, "length_varies", False):
            return divmod(self._start, self._length(0))
        number, skip = 0, self._start
        while skip >= (length := self._length(number)):
            number, skip = number + 1, skip - length
        return number, skip

    def _length(self, number: int) -> int:
        return len(self._whole(number))

    def _whole(self, number: int) -> BatchPass:
        """Pass ``number`` from its beginning, without beginning it."""
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(self._base + number)
        if isinstance(self._sampler, EpochBatchSampler):
            return self._sampler.whole()
        return _ForeignPass(self._sampler, self._base + number, 0)

    def _begin(self, number: int, skip: int) -> BatchPass:
        """Begin pass ``number`` at one of its batches."""
        run = self._whole(number)
        if isinstance(self._sampler, EpochBatchSampler):
            self._sampler.load_state_dict(run.state(skip))
            return self._sampler.start()
        return _ForeignPass(self._sampler, self._base + number, skip)


class _ForeignPass:
    """A pass over a batch sampler that is not ours: what has been had is skipped."""

    seed: int | None = None

    def __init__(self, sampler: Iterable[list[Any]], epoch: int, skip: int) -> None:
        self._sampler = sampler
        self._skip = skip
        self.epoch = epoch

    def __len__(self) -> int:
        return max(0, len(cast(Sized, self._sampler)) - self._skip)

    def __iter__(self) -> Iterator[Batch]:
        for number, indices in enumerate(self._sampler):
            if number >= self._skip:
                yield list(indices), None

    def state(self, count: int) -> State:
        return {"type": type(self._sampler).__name__, "yielded": self._skip + count}
