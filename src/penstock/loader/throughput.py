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
    """

    batches: int = 0
    wait: float = 0.0
    train: float = 0.0
    metrics: BatchMetrics = field(default_factory=BatchMetrics)

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

    def add(self, other: Throughput) -> None:
        """Add other batches."""
        self.batches += other.batches
        self.wait += other.wait
        self.train += other.train
        self.metrics.add(other.metrics)
        # They keep samples alive.
        self.metrics.failures.clear()


class ThroughputMeter:
    """Measures a number of workers over an epoch, a part of it, or several short ones.

    Args:
        workers: number of workers.
        seconds: sufficient measurement time, if it contains two rounds.
        ahead: number of batches that were already in flight. They do not count.
        limit: seconds after which an incomplete round counts.

    Attributes:
        found: the measurement in full rounds.
        first: seconds to the first batch of the latest iterator.
    """

    def __init__(self, workers: int, *, seconds: float, ahead: int = 0, limit: float = math.inf) -> None:
        self.found = Throughput()
        self.first = 0.0
        self._round = max(1, workers)
        self._seconds = seconds
        self._limit = limit
        self.begin(None, ahead)

    def begin(self, now: float | None, ahead: int = 0) -> None:
        """Start an iterator, at the time right before its workers get the first request; None in its midst."""
        self._began, self._last = now, now
        self._skip = ahead + self._round
        self._number, self._training = 0, 0.0
        # Batches before the first round, and those of the present round.
        self._early, self._part = Throughput(), Throughput()
        self._counts = False  # whether a round has counted

    def add(self, metrics: BatchMetrics, asked: float, had: float, depth: int = 0) -> bool:
        """Add a batch. Return whether the measurement is enough.

        Args:
            metrics: cost of the batch.
            asked, had: times of its request and delivery.
            depth: number of batches that may be in flight, which are ready after a pause.
        """
        wait, train = had - asked, 0.0 if self._last is None else asked - self._last
        if not self._number and self._began is not None:
            wait, train = had - self._began, 0.0
            self.first = wait
        elif self._number > 2 and train > max(_PAUSE, _LONGER * self._training / self._number):
            self._skip, self._part, train = depth + self._round, Throughput(), 0.0
        self._last = had
        self._number += 1
        self._training += train
        batch = Throughput(1, wait, train, metrics)
        if self._skip > 0:
            self._skip -= 1
            self._early.add(batch)
            return False
        self._part.add(batch)
        late = self.found.seconds + self._part.seconds >= self._limit
        if self._part.batches < self._round and not late:
            return False
        self._counts = True
        self.found.add(self._part)
        self._part = Throughput()
        return self.enough

    def end(self) -> None:
        """End a complete iterator. If it was too short for a round, its first batches count, too."""
        if not self._counts:
            self._counts = True
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
