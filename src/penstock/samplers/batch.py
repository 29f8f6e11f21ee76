"""`BatchSampler`: torch's, with the state of the sampler inside it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, cast

import torch.utils.data

from penstock.errors import SamplerError
from penstock.samplers.base import Batch, BatchPass, EpochSampler, NestedBatchSampler, Pass, exhaust, limit
from penstock.state import STATE_VERSION, State, check_state, read_int

__all__ = ["BatchSampler"]


class BatchSampler(NestedBatchSampler, torch.utils.data.BatchSampler):
    """Consecutive indices of a sampler, ``batch_size`` at a time.

    Args:
        sampler: one of ours, or any iterable of indices.
        batch_size: positive.
        drop_last: leave out a last batch that is not full.

    Raises:
        SamplerError: a batch size that is no positive integer or a drop_last that is no bool, in torch's words.

    Over one of our samplers the state is that sampler's, counted in whole batches: O(1), elastic, and no index is
    drawn again on resume. Over a foreign sampler the state is a count, and resuming skips as many of its indices, so
    it goes on exactly if that sampler repeats its order.

    >>> list(BatchSampler(range(10), batch_size=4, drop_last=False))
    [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    """

    def __init__(self, sampler: Iterable[Any], batch_size: int, drop_last: bool) -> None:
        if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size <= 0:
            raise SamplerError(f"batch_size should be a positive integer value, but got batch_size={batch_size}")
        if not isinstance(drop_last, bool):
            raise SamplerError(f"drop_last should be a boolean value, but got drop_last={drop_last}")
        super().__init__()
        self.sampler = sampler
        self.batch_size = batch_size
        self.drop_last = drop_last

    def peek(self) -> BatchPass:
        """The pass that `start` would begin."""
        if isinstance(self.sampler, EpochSampler):
            return self._over(self.sampler.peek())
        return super().peek()

    def whole(self) -> BatchPass:
        """A pass over the whole epoch, whatever state was loaded; nothing begins."""
        if isinstance(self.sampler, EpochSampler):
            return self._over(self.sampler.whole())
        return super().whole()

    def start(self) -> BatchPass:
        """Begin a pass of the sampler inside."""
        if not isinstance(self.sampler, EpochSampler):
            return super().start()
        self._pass = self._over(self.sampler.start())
        self._resume, self.yielded, self.epoch = None, 0, self.sampler.epoch
        return self._pass

    def resume(self, run: BatchPass) -> None:
        """The pass that ran before its epoch was set once more goes on after all; nothing if another was chosen."""
        if isinstance(self.sampler, EpochSampler) and isinstance(run, _Batches):
            self.sampler.resume(run.run)
            self.epoch = self.sampler.epoch
        super().resume(run)

    def _over(self, run: Pass) -> BatchPass:
        return _Batches(run, self.batch_size, self.drop_last)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state at the next ``iter()``; it is the sampler's own where that is one of ours.

        Raises:
            StateError: the state belongs to other data or to another order.
        """
        if isinstance(self.sampler, EpochSampler):
            self.sampler.load_state_dict(state)
            self.epoch, self.yielded, self._pass = self.sampler.epoch, 0, None
        else:
            super().load_state_dict(state)

    def _build(self, resume: State | None) -> BatchPass:
        skip = 0 if resume is None else int(resume["yielded"])
        return _ForeignBatches(self.sampler, self.batch_size, self.drop_last, self.epoch, skip)

    def _check(self, state: Mapping[str, Any]) -> State:
        check_state(state, {"version": STATE_VERSION}, of="BatchSampler")
        for name in ("epoch", "yielded"):
            read_int(state, name, of="BatchSampler")
        return dict(state)


class _Batches:
    """Batches over a pass of one of our samplers: arithmetic all the way."""

    def __init__(self, run: Pass, batch_size: int, drop_last: bool) -> None:
        self.run = run
        self._batch_size = batch_size
        self._drop_last = drop_last
        self.seed = run.seed
        self.epoch = run.epoch

    def __len__(self) -> int:
        return _count(len(self.run), self._batch_size, self._drop_last)

    def __iter__(self) -> Iterator[Batch]:
        # One look-up serves several batches: small ones would spend their time in NumPy's call overhead.
        step = self._batch_size * max(1, 1024 // self._batch_size)
        end = limit(self.run)
        end -= end % self._batch_size if self._drop_last else 0
        begin, stop = 0, min(self._batch_size, end)
        while begin < end:
            indices: list[Any] = self.run.indices(begin, stop).tolist()
            positions = self.run.positions(begin, stop)
            for a in range(0, len(indices), self._batch_size):
                if len(indices) - a < self._batch_size:
                    self.exhaust()  # torch sees the end while it draws a short batch
                yield indices[a : a + self._batch_size], positions[a : a + self._batch_size]
            begin, stop = stop, min(stop + step, end)
        self.exhaust()  # a tail that is dropped is drawn all the same, as by torch

    def exhaust(self) -> None:
        """The pass was read to its end, or will be read no further."""
        exhaust(self.run)

    def state(self, count: int) -> State:
        return self.run.state(min(count * self._batch_size, limit(self.run)))


class _ForeignBatches:
    """Batches over any iterable: what has been had is skipped."""

    seed: int | None = None

    def __init__(self, sampler: Iterable[Any], batch_size: int, drop_last: bool, epoch: int, skip: int) -> None:
        self._sampler = sampler
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._skip = skip
        self.epoch = epoch
        self.first_batch = skip // batch_size

    def __len__(self) -> int:
        return _count(max(0, len(cast(Sized, self._sampler)) - self._skip), self._batch_size, self._drop_last)

    def __iter__(self) -> Iterator[Batch]:
        indices = itertools.islice(iter(self._sampler), self._skip, None)
        while batch := list(itertools.islice(indices, self._batch_size)):
            if self._drop_last and len(batch) < self._batch_size:
                return
            yield batch, None

    def state(self, count: int) -> State:
        return {"version": STATE_VERSION, "epoch": self.epoch, "yielded": self._skip + count * self._batch_size}


def _count(samples: int, batch_size: int, drop_last: bool) -> int:
    return samples // batch_size if drop_last else -(-samples // batch_size)
