"""`Tally`: what a run has under a setting, measured over its own batches.

The first batch of every worker is put aside, and what comes right after it; then batches count in rounds of as many as
there are workers. Pauses of the program (validation, a checkpoint) count for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from penstock.loader.config import LoaderConfig
from penstock.loader.work import Work
from penstock.wording import counted

__all__ = ["ENOUGH", "INLINE", "LEAVES", "WARM", "Measured", "Setting", "Tally", "rate_text"]

ENOUGH = 0.05
"""A faster loader gains a run less than about this share, if it waits for less than this share of its time."""
LEAVES = {"auto": 0, "process": 1, "thread": 2, "inline": 3}
"""Executors, the one that leaves most of the program's own process to the training first."""
WARM = 0.1
"""Seconds after a setting's first batch that say nothing."""

_LONG = 3.0  # seconds that are enough for one round
_PAUSE, _LONGER = 0.5, 20  # seconds between two batches, and times the usual ones, that are no training step


@dataclass(frozen=True)
class Setting:
    """An executor and a number of workers, as a `penstock.DataLoader` takes them."""

    executor: str
    workers: int

    def of(self, config: LoaderConfig) -> LoaderConfig:
        """Return the config with this executor and number of workers."""
        return replace(config, executor=self.executor, num_workers=self.workers)

    @property
    def arguments(self) -> str:
        """As they are written in a program."""
        if not self.workers:
            return "num_workers=0"
        return f'executor="{self.executor}", num_workers={self.workers}'

    def __str__(self) -> str:
        if not self.workers:
            return "inline"
        if self.executor == "auto":
            return f"1 process, {counted(self.workers, 'thread')}"
        if self.executor == "ray":
            return counted(self.workers, "Ray worker")
        return counted(self.workers, "thread" if self.executor == "thread" else "process")


INLINE = Setting("inline", 0)


class Measured(NamedTuple):
    """What a run had under a setting.

    Attributes:
        batches, samples: of full rounds.
        wait: seconds in the loader.
        train: seconds between a batch and the request for the next one.
        work: seconds of work on those samples, all workers together.
        cpu, fetch: seconds of the processor in the data set, and all of its seconds.
        starts, start: workers were started so often, and took so many seconds to their first batches.
        error: why the setting cannot be had; "" if it can.
    """

    setting: Setting
    batches: int = 0
    samples: int = 0
    wait: float = 0.0
    train: float = 0.0
    work: float = 0.0
    cpu: float = 0.0
    fetch: float = 0.0
    starts: int = 0
    start: float = 0.0
    error: str = ""

    @property
    def seconds(self) -> float:
        """Of the run."""
        return self.wait + self.train

    @property
    def rate(self) -> float:
        """Samples/s."""
        return self.samples / self.seconds if self.seconds > 0 else 0.0

    @property
    def waiting(self) -> float:
        """Share of the time that the run waited."""
        return self.wait / self.seconds if self.seconds > 0 else 1.0

    def with_more(self, other: Measured) -> Measured:
        """Both together."""
        return Measured(self.setting, *(mine + theirs for mine, theirs in zip(self[1:], other[1:], strict=True)))  # type: ignore[operator]


class Tally:
    """Measures a setting, over the batches of one pass or a part of it.

    Args:
        setting: which.
        depth: batches that are in flight at most.
        before: what was measured of it in an earlier pass.
        now: the clock, right before its workers are given the first batch.
        least: seconds that are enough, with two rounds.
        warm: seconds from the first batch on that do not count.
    """

    def __init__(
        self, setting: Setting, depth: int, before: Measured | None, now: float, least: float, warm: float = WARM
    ) -> None:
        self._setting = setting
        self._least = least
        self._round = max(1, setting.workers)
        self._depth = depth
        self._before = Measured(setting) if before is None else before
        self._banked = Measured(setting)  # of this pass, before the last pause
        self._began = self._last = now
        self._start = 0.0
        self._sums = [0.0] * 7  # since the beginning, as the first numbers of `Measured`
        self._from = self._upto = self._sums  # the same when counting began, and at the end of the last full round
        self._skip, self._warm, self._warming = self._round, 0.0, warm

    def add(self, work: Work, asked: float, had: float) -> bool:
        """The run got a batch, by the clock; whether enough is known."""
        sums, gap, self._last = self._sums, asked - self._last, had
        count = sums[0]
        if not count:
            self._start, gap = had - self._began, 0.0
            self._warm = had + self._warming
        elif count > 2 and gap > max(_PAUSE, _LONGER * sums[3] / count):
            # The program did something else meanwhile, and finds more batches ready than it would have.
            self._banked, gap = self._so_far(), 0.0
            self._skip, self._warm = self._depth + self._round, had + self._warming
            self._from = self._upto = sums
        made = work.fetch + work.collate
        self._sums = sums = [
            count + 1,
            sums[1] + work.samples,
            sums[2] + had - asked,
            sums[3] + gap,
            sums[4] + made,
            sums[5] + work.cpu,
            sums[6] + work.fetch,
        ]
        if self._skip > 0 or had < self._warm:
            self._skip -= 1
            self._from = self._upto = sums
            return False
        if (sums[0] - self._from[0]) % self._round:
            return False
        self._upto = sums
        start = self._from
        passed = sums[2] + sums[3] - start[2] - start[3]
        if self._before.seconds + self._banked.seconds + passed < self._least:
            return False  # at little cost, for most batches
        return self._known(self.result())

    def result(self) -> Measured:
        """What was measured in full rounds."""
        found = self._before.with_more(self._so_far())
        started = self._sums[0] > 0
        return found._replace(starts=found.starts + started, start=found.start + self._start)

    def _so_far(self) -> Measured:
        since = [now - then for now, then in zip(self._upto, self._from, strict=True)]
        return self._banked.with_more(_measured(self._setting, since))

    def _known(self, found: Measured) -> bool:
        """Whether that is enough."""
        enough = found.batches >= 2 * self._round and found.seconds >= self._least
        return enough or (found.batches >= self._round and found.seconds >= _LONG)

    def at_end(self) -> tuple[Measured, bool]:
        """The pass is over: what was measured, and whether that is enough. If it was too short for a single round,
        everything counts, with the start of the workers.
        """
        found = self.result()
        if found.batches == self._before.batches and self._sums[0]:
            found = self._before.with_more(_measured(self._setting, self._sums))
        return found, self._known(found)


def _measured(setting: Setting, sums: list[float]) -> Measured:
    batches, samples, wait, train, work, cpu, fetch = sums
    return Measured(setting, int(batches), int(samples), wait, train, work, cpu, fetch)


def rate_text(rate: float) -> str:
    """Samples/s, with three digits that matter."""
    return f"{rate:,.0f}" if rate >= 99.5 else f"{rate:.3g}"
