"""`ThroughputMeter`: measures a consumer's samples/s and waiting time.

    worker 0  |--0--|--2--|--4--|       batches count from each worker's first one, in rounds of one batch per worker:
    worker 1  |--1--|--3--|--5--|       after a round, as much work is in flight as before
                    ^ here      ^ and here

Batches arrive in bursts of one per worker, so a measurement that ends within a round would be wrong. Pauses of the
program (validation, a checkpoint) do not count.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from penstock.loader.messages import BatchMetrics

__all__ = ["ENOUGH", "Throughput", "ThroughputMeter"]

ENOUGH = 0.05
"""Share of waiting time below which a faster loader gains less than about this share."""

# Seconds after the first batch that are not measured.
_WARM = 0.1
# One round is enough if it takes this many times the requested seconds.
_LONG = 3
# An interval between batches is a pause if it exceeds this many seconds and this many times the average.
_PAUSE, _LONGER = 0.5, 20


@dataclass
class Throughput:
    """The measured batches of a consumer.

    Attributes:
        batches: number of measured batches.
        wait: seconds in the loader.
        train: seconds between a batch and the next request.
        metrics: metrics of these batches, of all workers together.
        starts: number of times that workers were started before measured batches.
        start: seconds from these starts to the first batches.
    """

    batches: int = 0
    wait: float = 0.0
    train: float = 0.0
    metrics: BatchMetrics = field(default_factory=BatchMetrics)
    starts: int = 0
    start: float = 0.0

    @property
    def samples(self) -> int:
        """Number of samples in the batches."""
        return self.metrics.samples

    @property
    def seconds(self) -> float:
        """Seconds of the consumer."""
        return self.wait + self.train

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.samples / self.seconds if self.seconds > 0 else 0.0

    @property
    def waiting(self) -> float:
        """Share of time that the consumer waited."""
        return self.wait / self.seconds if self.seconds > 0 else 1.0

    def count(self, metrics: BatchMetrics, wait: float, train: float) -> None:
        """Add a batch."""
        self.batches += 1
        self.wait += wait
        self.train += train
        self.metrics.add(metrics)
        # They keep samples alive.
        self.metrics.failures.clear()

    def add(self, other: Throughput) -> None:
        """Add the batches of another throughput."""
        self.batches += other.batches
        self.wait += other.wait
        self.train += other.train
        self.metrics.add(other.metrics)
        self.starts += other.starts
        self.start += other.start


class ThroughputMeter:
    """Measures one setting over an epoch, a part of it, or several short ones.

    Args:
        workers: number of workers.
        seconds: sufficient measurement time, if it contains two rounds.
        warm: seconds after an iterator's first batch that are not measured.
        depth: maximum number of batches in flight.
        limit: seconds after which an incomplete round counts.

    Attributes:
        found: the measurement in full rounds.
        first: seconds to the first batch.
    """

    def __init__(
        self, workers: int, *, seconds: float, warm: float = _WARM, depth: int = 0, limit: float = math.inf
    ) -> None:
        self.found = Throughput()
        self.first = 0.0
        self._round = max(1, workers)
        self._seconds = seconds
        self._warm = warm
        self._depth = depth
        self._limit = limit
        self.begin(0.0)

    def begin(self, now: float) -> None:
        """Start an iterator, at the time right before its workers get the first request."""
        self._began = self._last = now
        self._number, self._train_seconds = 0, 0.0
        # Whether a round of this iterator has counted.
        self._counts = False
        self._ignore(self._round, math.inf)
        self._early, self._part = Throughput(), Throughput()

    def add(self, metrics: BatchMetrics, asked: float, had: float) -> bool:
        """Add a batch, with the times of its request and delivery. Return whether the measurement is enough."""
        wait, train = had - asked, asked - self._last
        self._last = had
        if not self._number:
            wait, train = had - self._began, 0.0
            self.first = self.first or wait
            self._start, self._warm_until = wait, had + self._warm
        elif self._number > 2 and train > max(_PAUSE, _LONGER * self._train_seconds / self._number):
            # A pause of the program: more batches are ready now than usual.
            self._ignore(self._depth + self._round, had + self._warm)
            self._part, train = Throughput(), 0.0
        self._number += 1
        self._train_seconds += train
        if self._skip > 0 or had < self._warm_until:
            self._skip -= 1
            self._early.count(metrics, wait, train)
            return False
        self._part.count(metrics, wait, train)
        late = self.found.seconds + self._part.seconds >= self._limit
        if self._part.batches < self._round and not late:
            return False
        if not self._counts:
            self._counts = True
            self.found.starts, self.found.start = self.found.starts + 1, self.found.start + self._start
        self.found.add(self._part)
        self._part = Throughput()
        return self.enough

    def end(self) -> None:
        """End a complete iterator. If it was too short for a round, its first batches count, too."""
        if not self._counts:
            self.found.add(self._early)
            self.found.add(self._part)

    @property
    def enough(self) -> bool:
        """Whether the measurement is enough."""
        found = self.found
        if found.seconds >= self._limit:
            return True
        rounds = 1 if found.seconds >= _LONG * self._seconds else 2
        return found.seconds >= self._seconds and found.batches >= rounds * self._round

    def _ignore(self, batches: int, until: float) -> None:
        """Ignore the next ``batches`` batches, and all until a time."""
        self._skip, self._warm_until = batches, until
