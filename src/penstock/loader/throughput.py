"""`ThroughputMeter`: measures how many samples/s a consumer gets, and how long it waits for them.

    worker 0  |--0--|--2--|--4--|       batches count from the first one of every worker on, in rounds: after as many
    worker 1  |--1--|--3--|--5--|       batches as there are workers, as much is under way as there was before
                    ^ here      ^ and here

Batches come in bursts of as many as there are workers, so a measurement that stops within a round is wrong by as much.
Pauses of the program (validation, a checkpoint) count for nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from penstock.loader.messages import BatchMetrics

__all__ = ["ENOUGH", "Throughput", "ThroughputMeter"]

ENOUGH = 0.05
"""A faster loader gains a run less than about this share, if it waits for less than this share of its time."""

_WARM = 0.1  # seconds after the first batch that say nothing of a setting
_LONG = 3  # times the seconds that are wanted: then one round is enough
_PAUSE, _LONGER = 0.5, 20  # seconds between two batches, and times the usual ones, that are no training step


@dataclass
class Throughput:
    """What a consumer got.

    Attributes:
        batches: that count.
        wait: seconds in the loader.
        train: seconds between a batch and the request for the next one.
        metrics: of these batches, all workers together.
        starts: workers were started so often, before batches that count.
        start: seconds that they took to their first batches.
    """

    batches: int = 0
    wait: float = 0.0
    train: float = 0.0
    metrics: BatchMetrics = field(default_factory=BatchMetrics)
    starts: int = 0
    start: float = 0.0

    @property
    def samples(self) -> int:
        """Samples of the batches."""
        return self.metrics.samples

    @property
    def seconds(self) -> float:
        """Seconds of the consumer."""
        return self.wait + self.train

    @property
    def rate(self) -> float:
        """Samples/s."""
        return self.samples / self.seconds if self.seconds > 0 else 0.0

    @property
    def waiting(self) -> float:
        """Share of its time that the consumer waited."""
        return self.wait / self.seconds if self.seconds > 0 else 1.0

    def count(self, metrics: BatchMetrics, wait: float, train: float) -> None:
        """Count a batch."""
        self.batches += 1
        self.wait += wait
        self.train += train
        self.metrics.add(metrics)
        self.metrics.failures.clear()  # they hold on to samples

    def add(self, other: Throughput) -> None:
        """Count the batches of another one in."""
        self.batches += other.batches
        self.wait += other.wait
        self.train += other.train
        self.metrics.add(other.metrics)
        self.starts += other.starts
        self.start += other.start


class ThroughputMeter:
    """Measures one setting over a pass, a part of it, or several short ones.

    Args:
        workers: that make the batches.
        seconds: that are enough, with two rounds.
        warm: seconds from the first batch of a pass on that do not count.
        depth: batches that are in flight at most.
        limit: seconds after which a part of a round has to do.

    Attributes:
        found: what was measured in full rounds.
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
        """Begin a pass, by the clock right before its workers are given the first batch."""
        self._began = self._last = now
        self._number, self._trained = 0, 0.0
        self._counts = False  # whether a round of this pass does
        self._put_aside(self._round, math.inf)
        self._early, self._part = Throughput(), Throughput()

    def add(self, metrics: BatchMetrics, asked: float, had: float) -> bool:
        """Count a batch that was asked for and had at these times; return whether enough is known."""
        wait, train = had - asked, asked - self._last
        self._last = had
        if not self._number:
            wait, train = had - self._began, 0.0
            self.first = self.first or wait
            self._start, self._warm_until = wait, had + self._warm
        elif self._number > 2 and train > max(_PAUSE, _LONGER * self._trained / self._number):
            # The program did something else meanwhile, and finds more batches ready than it would have.
            self._put_aside(self._depth + self._round, had + self._warm)
            self._part, train = Throughput(), 0.0
        self._number += 1
        self._trained += train
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
        """End a pass that had all of its batches. One that was too short for a round counts with its start."""
        if not self._counts:
            self.found.add(self._early)
            self.found.add(self._part)

    @property
    def enough(self) -> bool:
        """Whether what was found is enough."""
        found = self.found
        if found.seconds >= self._limit:
            return True
        rounds = 1 if found.seconds >= _LONG * self._seconds else 2
        return found.seconds >= self._seconds and found.batches >= rounds * self._round

    def _put_aside(self, batches: int, until: float) -> None:
        """Count nothing for so many batches, and until this time."""
        self._skip, self._warm_until = batches, until
