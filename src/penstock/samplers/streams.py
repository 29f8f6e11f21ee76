"""The whole job's stream of indices, whichever sampler it comes from: what `GroupedBatchSampler` cuts into batches."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np

from penstock.errors import SamplerError
from penstock.order.permutation import Indices
from penstock.samplers.base import Pass, exhaust
from penstock.samplers.grouping import Groups
from penstock.samplers.orders import OrderPass
from penstock.state import State

__all__ = ["ForeignStream", "PassStream", "Stream"]

_FIRST_CHUNK = 4096  # the first batch comes at once


class Stream(Protocol):
    """Indices of one pass of the whole job."""

    seed: int | None
    epoch: int

    @property
    def first(self) -> int:
        """Global position of the first index."""
        ...

    @property
    def rounds(self) -> int | None:
        """How often the stream has every sample, if all of them equally often; else None."""
        ...

    def chunks(self, largest: int) -> Iterator[Indices]:
        """The indices, in chunks that grow up to a size. Can be walked more than once."""
        ...

    def exhaust(self) -> None:
        """The pass was read to its end."""
        ...

    def sizes(self, groups: Groups) -> Indices:
        """How many indices of each group there are."""
        ...

    def state(self) -> State:
        """The state of the sampler at the beginning of the pass."""
        ...


class PassStream:
    """The stream behind a pass of one of our samplers; of a `DistributedSampler` the order of all ranks together."""

    def __init__(self, run: Pass) -> None:
        self._run = run
        self._job: Pass = run.job() if isinstance(run, OrderPass) else run
        self.seed = run.seed
        self.epoch = run.epoch

    @property
    def first(self) -> int:
        return int(self._job.positions(0, 1)[0]) if len(self._job) else 0

    @property
    def rounds(self) -> int | None:
        return self._job.rounds if isinstance(self._job, OrderPass) else None

    def chunks(self, largest: int) -> Iterator[Indices]:
        for a, b in _bounds(len(self._job), largest):
            yield self._job.indices(a, b)

    def exhaust(self) -> None:
        exhaust(self._job)

    def sizes(self, groups: Groups) -> Indices:
        if self.rounds is not None:
            return groups.sizes() * self.rounds
        return groups.sizes_in(groups.of(chunk) for chunk in self.chunks(1 << 16))

    def state(self) -> State:
        return self._run.state(0)


class ForeignStream:
    """The stream of any other iterable. Counting it keeps it (8 bytes an index), so that it is not drawn again."""

    seed: int | None = None
    first = 0
    rounds: int | None = None

    def __init__(self, sampler: Iterable[Any], epoch: int) -> None:
        if isinstance(sampler, Iterator):
            raise SamplerError(
                f"the sampler is an iterator ({type(sampler).__name__}), which ends with the first pass: "
                "give the iterable that it comes from"
            )
        self._sampler = sampler
        self._kept: Indices | None = None
        self._sizes: Indices | None = None
        self.epoch = epoch

    def chunks(self, largest: int) -> Iterator[Indices]:
        if self._kept is not None:
            for a, b in _bounds(len(self._kept), largest):
                yield self._kept[a:b]
            return
        indices, size = map(operator.index, self._sampler), _FIRST_CHUNK
        while (chunk := np.fromiter(itertools.islice(indices, size), dtype=np.int64)).size:
            yield chunk
            size = min(size * 4, largest)

    def exhaust(self) -> None:
        pass  # it exhausts itself

    def sizes(self, groups: Groups) -> Indices:
        if self._sizes is None:
            self._kept = np.concatenate([np.empty(0, dtype=np.int64), *self.chunks(1 << 20)])
            self._sizes = groups.sizes_in(groups.of(chunk) for chunk in self.chunks(1 << 16))
        return self._sizes

    def state(self) -> State:
        return {"type": type(self._sampler).__name__, "epoch": self.epoch}


def _bounds(n: int, largest: int) -> Iterator[tuple[int, int]]:
    begin, size = 0, _FIRST_CHUNK
    while begin < n:
        yield begin, min(begin + size, n)
        begin, size = begin + size, min(size * 4, largest)
