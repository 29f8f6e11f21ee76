"""`IterationBasedBatchSampler`: a fixed number of batches, epoch after epoch of a batch sampler."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from penstock.errors import SamplerError
from penstock.plan.cursor import Cursor
from penstock.plan.epoch import Batch, BatchEpochPlan
from penstock.plan.reader import Draws
from penstock.samplers.base import EpochBatchSampler
from penstock.samplers.batch import batch_plan_of
from penstock.wording import kind_text

__all__ = ["IterationBasedBatchSampler"]

_EPOCH_SHIFT = 40
_EPOCHS = 1 << 22
"""Positions of epoch j are shifted by ``j << 40``, so that no two samples share a generator (up to 1e12 samples)."""
_LAG = 4096
"""How many batches a consumer may be behind the iterator and still get its state."""
_DRAWS_KEPT = 8
_EMPTY_EPOCHS = 100


class IterationBasedBatchSampler(EpochBatchSampler):
    """The batches of a batch sampler, from iteration ``start_iter`` up to ``num_iterations``.

    Args:
        batch_sampler: a Penstock batch sampler, or any batch sampler with a length.
        num_iterations: iterations of the whole training.
        start_iter: the first iteration, 0 to num_iterations.

    Raises:
        SamplerError: a number is outside its range, or the batch sampler has no length.

    Iteration i is batch ``i % len`` of epoch ``base + i // len`` of the batch sampler. Its ``set_epoch`` is called if
    it has one. ``base`` is 0, or the epoch of `set_epoch`.

    **Restart.** If the batches are a function of (seed, epoch), ``start_iter`` alone resumes exactly, and so does
    `load_state_dict`; earlier epochs are not read. Samplers that draw from a ``generator`` need `load_state_dict`. So
    do samplers that draw from torch's global generator (``RandomSampler(shuffle=True)`` without a generator): they
    complete the current epoch exactly, and draw later epochs with new random numbers. Batch samplers of other libraries
    resume exactly if they repeat their order. If epochs have different lengths (groups over draws with replacement),
    ``start_iter`` counts the batches of every epoch before it.

    ``len`` is the number of batches that are yielded: ``num_iterations - start_iter``, or 0 over an empty batch
    sampler.

    The state is elastic if the batch sampler's is. With another number of ranks, the rest of the current epoch is split
    again and takes more or fewer iterations; the run still ends at ``num_iterations``.

    >>> from penstock.samplers import BatchSampler, SequentialSampler
    >>> batches = BatchSampler(SequentialSampler(range(5)), 2, drop_last=False)
    >>> list(IterationBasedBatchSampler(batches, 5, start_iter=1))
    [[2, 3], [4], [0, 1], [2, 3]]
    """

    def __init__(self, batch_sampler: Iterable[list[Any]], num_iterations: int, start_iter: int = 0) -> None:
        super().__init__()
        if not isinstance(num_iterations, int) or num_iterations < 0:
            raise SamplerError(f"num_iterations must be an integer, 0 or more, got {num_iterations!r}")
        if not isinstance(start_iter, int) or not 0 <= start_iter <= num_iterations:
            raise SamplerError(
                f"start_iter must be an integer from 0 to num_iterations={num_iterations}, got {start_iter}"
            )
        if not hasattr(batch_sampler, "__len__"):
            raise SamplerError(
                f"{kind_text(batch_sampler)} has no length: iterations are computed from the number of batches"
            )
        self.batch_sampler = batch_sampler
        self.num_iterations = num_iterations
        self.start_iter = start_iter
        self.inner = batch_plan_of(batch_sampler)
        """The plan of the batch sampler."""

    @property
    def batch_size(self) -> int | None:
        """``batch_size`` of the batch sampler, if it has one."""
        size: int | None = getattr(self.batch_sampler, "batch_size", None)
        return size

    @property
    def key_seed(self) -> int | None:
        """Seed of the samples' generators."""
        return self.inner.key_seed

    def bind(self, cursor: Cursor, draws: Draws) -> BatchEpochPlan:
        """Return the iterations from the cursor on."""
        if draws.held is None:
            draws.held = {}
        return _Iterations(self, cursor, draws)

    def read(self, state: Mapping[str, Any]) -> Cursor:
        """Return the cursor in a state."""
        return Cursor.read(
            state,
            of="IterationBasedBatchSampler",
            plan={"num_iterations": self.num_iterations},
            unit="iteration",
            most=self.num_iterations,
            sampler=self.inner.read,
        )

    def chosen(self, cursor: Cursor) -> None:
        """Pass on a cursor that the user of a reader chose."""
        if cursor.sampler is not None:
            self.inner.chosen(cursor.sampler)


class _Iterations(BatchEpochPlan):
    """The batches of successive epochs. A started epoch is stored while the consumer may need a cursor in it."""

    def __init__(self, sampler: IterationBasedBatchSampler, cursor: Cursor, draws: Draws) -> None:
        self._sampler, self._cursor, self._draws = sampler, cursor, draws
        self._start = sampler.start_iter if cursor.sampler is None else cursor.consumed
        # Epochs of the batch sampler, each with the number of batches before it.
        self._begun: deque[tuple[int, BatchEpochPlan]] = deque()
        if cursor.sampler is not None:
            # The first call for an epoch fixes its draw: here, the draw in the state.
            self._bind(cursor.sampler)
        self.epoch = cursor.epoch
        self.seed = sampler.key_seed

    def after(self, count: int) -> Cursor:
        """Return the start of the epoch after the last one from which a batch was delivered."""
        return Cursor(epoch=self._epoch_of(count)[0].epoch + 1)

    def __len__(self) -> int:
        left = max(0, self._sampler.num_iterations - self._start)
        return left if left and len(self._bind(Cursor(epoch=self.epoch))) else 0

    def __iter__(self) -> Iterator[Batch]:
        done, left, empty = 0, len(self), 0
        self._begun.clear()
        if not left and self._cursor.sampler is None:
            return
        run, skip = self._locate()
        if skip and not run.one_by_one:
            run, skip = self._bind(run.cursor(skip)), 0
        while True:
            self._begun.append((done - skip, run))
            while len(self._begun) > 1 and self._begun[1][0] < done - _LAG:
                self._begun.popleft()
            # These follow the current inner plan.
            self.one_by_one, self.per_rank = run.one_by_one, run.per_rank
            before, shift = done, (run.epoch - self.epoch) % _EPOCHS << _EPOCH_SHIFT
            for indices, positions in itertools.islice(run, skip, skip + left - done):
                done += 1
                yield indices, positions + shift
            if done == left:
                run.exhaust()  # the next epoch must not begin after the last iteration
                return
            empty = empty + 1 if done == before else 0
            if empty > _EMPTY_EPOCHS:
                raise SamplerError(f"{empty} epochs of the batch sampler in a row yielded no batch")
            run, skip = self._bind(Cursor(epoch=run.epoch + 1)), 0

    def cursor(self, count: int) -> Cursor:
        run, delivered = self._epoch_of(count)
        return Cursor(
            epoch=self.epoch,
            consumed=self._start + count,
            unit="iteration",
            plan={"num_iterations": self._sampler.num_iterations},
            sampler=run.cursor(delivered),
        )

    def _epoch_of(self, count: int) -> tuple[BatchEpochPlan, int]:
        """Return the epoch of the last of ``count`` batches, and how many of its batches are delivered then."""
        if not self._begun and count == 0:
            return self._locate()
        # Between two epochs the earlier one counts, even if the later one has begun.
        for before, run in reversed(self._begun):
            if before < max(count, 1):
                return run, count - before
        raise SamplerError(
            f"cannot return the state after {count} batches: this iterator "
            + (f"is more than {_LAG} batches ahead" if self._begun else "has not been started")
        )

    def _bind(self, cursor: Cursor) -> BatchEpochPlan:
        """Return the cursor's epoch of the batch sampler, with the same draw at every call."""
        # The draws of the last few epochs, by the number of the epoch.
        held: dict[int, Draws] = self._draws.held
        draws = held.setdefault(cursor.epoch, Draws(self._draws.seed))
        while len(held) > _DRAWS_KEPT:
            del held[next(iter(held))]
        return self._sampler.inner.bind(cursor, draws)

    def _locate(self) -> tuple[BatchEpochPlan, int]:
        """Return the epoch of the first iteration, and the number of its batches before that iteration."""
        if self._cursor.sampler is not None:
            return self._bind(self._cursor.sampler), 0
        run, skip = self._bind(Cursor(epoch=self.epoch)), self._start
        if skip == 0 or len(run) == 0:
            return run, 0
        if not run.length_varies:
            number, skip = divmod(skip, len(run))
            return self._bind(Cursor(epoch=self.epoch + number)), skip
        while skip >= len(run):
            skip -= len(run)
            run = self._bind(Cursor(epoch=run.epoch + 1))
        return run, skip
