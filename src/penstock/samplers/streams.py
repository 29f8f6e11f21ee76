"""Index streams of a whole job, from any sampler: the input of `GroupedBatchSampler`."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import xxhash

from penstock.distributed import current
from penstock.errors import SamplerError, StateError
from penstock.order.permutation import Indices
from penstock.plan.cursor import Cursor
from penstock.plan.epoch import EpochPlan
from penstock.samplers.external import reported_epoch
from penstock.samplers.grouping import Groups
from penstock.samplers.shares import rank_of

__all__ = ["ExternalStream", "JobStream", "Stream"]

_FIRST_CHUNK = 4096
"""Indices in the first chunk, few so that the first batch is ready at once."""


class Stream(Protocol):
    """Indices of one epoch of the whole job."""

    seed: int | None
    epoch: int

    @property
    def first(self) -> int:
        """Global position of the first index."""
        ...

    @property
    def rounds(self) -> int | None:
        """How often the stream yields each sample, if equally often; else None."""
        ...

    def chunks(self, largest: int) -> Iterator[Indices]:
        """Yield the indices in chunks, which grow up to a size. Can be called more than once."""
        ...

    def exhaust(self) -> None:
        """Record that the epoch was read to its end."""
        ...

    def sizes(self, groups: Groups) -> Indices:
        """Return the number of indices of each group."""
        ...

    def cursor(self) -> Cursor:
        """Return the sampler's cursor at the start of the epoch."""
        ...


class JobStream:
    """The stream of an epoch plan; for a `DistributedSampler`, the order of all ranks together."""

    def __init__(self, run: EpochPlan) -> None:
        self._run = run
        self._job = run.job()
        self.seed = run.seed
        self.epoch = run.epoch

    @property
    def first(self) -> int:
        return int(self._job.positions(0, 1)[0]) if len(self._job) else 0

    @property
    def rounds(self) -> int | None:
        return self._job.rounds

    def chunks(self, largest: int) -> Iterator[Indices]:
        for a, b in _bounds(len(self._job), largest):
            yield self._job.indices(a, b)

    def exhaust(self) -> None:
        self._job.exhaust()

    def sizes(self, groups: Groups) -> Indices:
        if self.rounds is not None:
            return groups.sizes() * self.rounds
        return groups.sizes_in(groups.of(chunk) for chunk in self.chunks(1 << 16))

    def cursor(self) -> Cursor:
        return self._run.cursor(0)


class ExternalStream:
    """The stream of any other iterable. Counting it holds all indices (8 bytes each), so that it is drawn only once.

    A cursor holds a hash of the first indices. Resuming a sampler that does not repeat its order raises an error.
    """

    seed: int | None = None
    first = 0
    rounds: int | None = None

    def __init__(self, sampler: Iterable[Any], cursor: Cursor) -> None:
        if isinstance(sampler, Iterator):
            raise SamplerError(
                f"the sampler is an iterator ({type(sampler).__name__}), which ends with the first epoch: "
                "pass an iterable, such as a list or a sampler object"
            )
        self._sampler = sampler
        self._kept: Indices | None = None
        self._sizes: Indices | None = None
        self._entropy = cursor.entropy
        self.epoch = cursor.epoch

    def chunks(self, largest: int) -> Iterator[Indices]:
        if self._kept is not None:
            for a, b in _bounds(len(self._kept), largest):
                yield self._kept[a:b]
            return
        if hasattr(self._sampler, "set_epoch") and (reported_epoch(self._sampler) or 0) != self.epoch:
            self._sampler.set_epoch(self.epoch)
        indices, size = map(operator.index, self._sampler), _FIRST_CHUNK
        while (chunk := np.fromiter(itertools.islice(indices, size), dtype=np.int64)).size:
            if size == _FIRST_CHUNK:
                self._compare(chunk)
            yield chunk
            size = min(size * 4, largest)

    def _compare(self, chunk: Indices) -> None:
        """Raise if the first indices differ from the run that saved the state."""
        found = xxhash.xxh3_64_hexdigest(chunk.tobytes())
        rank = rank_of(self._sampler, ranks=current().world_size)
        expected = self._entropy.get("hash", found)
        if self._entropy.get("rank", rank) != rank:
            expected = found  # the hash comes from another rank's share
        if found != expected:
            raise StateError(
                f"{type(self._sampler).__name__} does not repeat its order: its first {len(chunk)} indices differ from "
                f"the first run (hash {expected} in the state, {found} here). Seed the sampler as in the first run, "
                "use a Penstock sampler, or begin the epoch anew without the state"
            )
        self._entropy = {"hash": found} if rank is None else {"hash": found, "rank": rank}

    def exhaust(self) -> None:
        pass  # reading the last chunk has exhausted the sampler

    def sizes(self, groups: Groups) -> Indices:
        if self._sizes is None:
            self._kept = np.concatenate([np.empty(0, dtype=np.int64), *self.chunks(1 << 20)])
            self._sizes = groups.sizes_in(groups.of(chunk) for chunk in self.chunks(1 << 16))
        return self._sizes

    def cursor(self) -> Cursor:
        return Cursor(epoch=self.epoch, plan={"order": type(self._sampler).__name__}, entropy=self._entropy)


def _bounds(n: int, largest: int) -> Iterator[tuple[int, int]]:
    begin, size = 0, _FIRST_CHUNK
    while begin < n:
        yield begin, min(begin + size, n)
        begin, size = begin + size, min(size * 4, largest)
