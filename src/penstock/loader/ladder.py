"""`Ladder`: which executor and how many workers, found by trying a few of them, one after the other. No processes here.

    1 process    --> 2 processes --> 2 threads --> 4 ... --> inline         a rung: batches of the run itself, measured
      waits?          more?            more?      no more    as quick?      enough, or no more to be had: chosen

Rules: a setting under which the run waits for less than 5 % of its time is enough, and nothing larger is tried. Else
the number of workers grows as long as that pays. Of settings that are within 5 % of the best one, that with the fewest
workers is chosen, then the one that leaves most to the training. Batches are made inline where that takes less than
handing them over. Of cheap batches, settings differ by less than a new process and an old one: those that came close to
the best one are measured again, and later after their start.

`Tally` measures a rung: the first batch of every worker aside, in rounds of as many batches as there are workers.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.loader.work import Work

__all__ = ["INLINE", "Ladder", "Measured", "Setting", "Tally", "worker_counts"]

_WAITS = 0.5  # share of waiting from which more workers than cores are tried
_ENOUGH = 0.05  # share of its time that a run may wait: as in `penstock.loader.report`
_AS_GOOD = 0.95
_GAIN, _LARGE_GAIN = 1.05, 1.25  # that a rung has to bring for another one; the second beyond the cores
_SPARE = 1.1  # workers, over those that would just keep up
_SURE = 0.9  # of the seconds of the best: then inline is chosen untried, where trying it is not safe
_MOST = 64  # workers, if there are not more cores
_CHEAP = 1e-3  # seconds of a batch, below which handing over limits and not the cores
_FEW = 4  # cores, of which the training's own process takes a share that counts
_CLOSE = 0.6  # of the best rate: good enough for another look, if batches are cheap
_TELLING = 64  # batches by which it is known whether a data set computes or waits: one in 16 is measured
_LEAST, _LONG = 0.8, 3.0  # seconds of a rung
_WARM, _WARM_AGAIN = 0.1, 0.6  # seconds that are passed over: several processes become faster for half a second
_PAUSE, _LONGER = 0.5, 20  # seconds between two batches, and times the usual ones, that are no training step
_LEAVES = {"auto": 0, "process": 1, "thread": 2, "inline": 3}


@dataclass(frozen=True)
class Setting:
    """An executor and a number of workers, as a `penstock.DataLoader` takes them."""

    executor: str
    workers: int

    @property
    def arguments(self) -> str:
        """As they are written in a program."""
        if not self.workers:
            return "num_workers=0"
        return f'executor="{self.executor}", num_workers={self.workers}'

    def __str__(self) -> str:
        if not self.workers:
            return "inline"
        many = "s" * (self.workers > 1)
        if self.executor == "auto":
            return f"1 process, {self.workers} thread{many}"
        if self.executor == "ray":
            return f"{self.workers} Ray worker{many}"
        kind = "thread" if self.executor == "thread" else "process"
        return f"{self.workers} {kind}{many and ('s' if kind == 'thread' else 'es')}"


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


def worker_counts(cores: int, waiting: float) -> list[int]:
    """The numbers of workers to try."""
    counts = {1, 2, cores} if cores <= 4 else {1, max(2, cores // 4), cores // 2, cores}
    if waiting > _WAITS:
        counts |= {2 * cores, 4 * cores}
    return sorted(counts)


class Ladder:
    """Tries settings until one is chosen.

    Args:
        executors: with workers, that may be tried; the one that leaves most to the training first.
        inline: "try" it, "trust" the arithmetic (a data set that does not say it is ``pure`` may keep an open file,
            which a later fork would share with this process), or "never".
        cores: of this machine.
        persistent: whether workers outlive a pass, so that starting them costs nothing in the long run.
        seconds: of a rung, at least.
        overhead: seconds that an inline batch takes besides the work on it.

    Attributes:
        current: the setting to use now.
        decided: whether it is the one to stay with.
        results: what was measured.
        why: in words, once it is decided.
        kept: what was measured of the current setting in a pass that has ended since.
        length: batches of a pass; None where nobody knows.
        most: workers that there is memory for; None where nobody knows.
    """

    def __init__(
        self,
        executors: Sequence[str],
        *,
        inline: str,
        cores: int,
        persistent: bool,
        seconds: float = _LEAST,
        overhead: float = 0.0,
    ) -> None:
        self.results: list[Measured] = []
        self.decided = False
        self.why = ""
        self.kept: Measured | None = None
        self.length: int | None = None
        self.most: int | None = None
        self._inline = inline
        self._cores = cores
        self._persistent = persistent
        self._seconds = seconds
        self._overhead = overhead
        self._steps = self._climb(list(executors))
        self.current = next(self._steps)

    def note(self, result: Measured) -> None:
        """The current setting was measured, or (with an error) cannot be had: go on to the next one."""
        assert not self.decided
        again = next((n for n, one in enumerate(self.results) if one.setting == result.setting), None)
        if again is None:
            self.results.append(result)
        else:
            self.results[again] = result
        self.kept = None
        try:
            self.current = self._steps.send(result)
        except StopIteration:
            self.current, self.decided = self._choose(), True

    def tally(self, depth: int, now: float) -> Tally:
        """Measures the current setting from now on."""
        again = any(one.setting == self.current for one in self.results)
        return Tally(self.current, depth, self.kept, now, self._seconds, _WARM_AGAIN if again else _WARM)

    def stats(self) -> dict[str, Any]:
        """What was found so far, as plain numbers and text."""
        tried = [
            {
                "executor": one.setting.executor,
                "workers": one.setting.workers,
                "batches": one.batches,
                "samples_per_second": one.rate,
                "wait_share": one.waiting,
                "error": one.error,
            }
            for one in self.results
        ]
        chosen = {"executor": self.current.executor, "workers": self.current.workers} if self.decided else None
        return {"chosen": chosen, "why": self.why, "tried": tried}

    def _climb(self, kinds: list[str]) -> Generator[Setting, Measured, None]:
        first = yield Setting(kinds[0], 1)
        enough = first.waiting < _ENOUGH
        if not enough:
            counts = self._counts(first)
            enough, others = yield from self._rise(kinds, counts, self._rate(first))
            most = max(self.results, key=self._rate).setting.workers
            tried = {one.setting for one in self.results}
            for kind in others if most > self._cores else ():
                # As good with few workers; many threads are less of a burden than many processes.
                more = [count for count in counts if count >= most and Setting(kind, count) not in tried]
                if not enough:
                    enough, _ = yield from self._rise([kind], more, 0.0)
        if self._inline == "try" and self._inline_seconds() <= self._best_seconds() / _AS_GOOD:
            yield INLINE
        for contender in () if enough else self._contenders():
            _ = yield contender  # not `yield from`: a list takes no results

    def _rise(
        self, kinds: list[str], counts: list[int], best: float
    ) -> Generator[Setting, Measured, tuple[bool, list[str]]]:
        """More and more workers, as long as that pays, beside ``best`` samples/s: whether it is enough, and which kinds
        were as good as the one that went on."""
        misses, others = 0, list[str]()
        for count in counts:
            if self.most is not None and count > self.most:
                break
            found = []
            for kind in kinds:
                found.append((yield Setting(kind, count)))
                if found[-1].waiting < _ENOUGH:
                    return True, others
            top = max(map(self._rate, found))
            good, *rest = [one.setting.executor for one in found if self._rate(one) >= _AS_GOOD * top]
            kinds, others = [good], others + rest
            misses += top < (_LARGE_GAIN if count >= self._cores else _GAIN) * best
            # One rung that brings nothing, though there is a core for it, may be noise.
            if misses == 2 or (misses and count > self._cores):
                break
            best = max(best, top)
        return False, others

    def _contenders(self) -> list[Setting]:
        """What to measure again; never first what was measured last."""
        first, top = self.results[0], max(map(self._rate, self.results))
        if first.error or first.seconds >= _CHEAP * first.batches:
            return []
        close = [one.setting for one in self.results if self._rate(one) >= _CLOSE * top]
        return close if len(close) > 1 else []

    def _counts(self, first: Measured) -> list[int]:
        """Numbers of workers to try after the first one: up to the cores; twice as many where batches are cheap, and
        again and again unless the data set only computes; of few cores, once in any case. Fewer than the training needs
        are left out.
        """
        top = max(_MOST, self._cores)
        counts = [count for count in worker_counts(self._cores, 0.0) if count > 1]
        known, waits = first.batches >= _TELLING, first.cpu < (1 - _WAITS) * first.fetch
        while not (known and not waits) and (more := 2 * max([*counts, self._cores])) <= top:
            counts.append(more)
        beyond = first.seconds < _CHEAP * first.batches or self._cores <= _FEW
        if max([1, *counts]) <= self._cores and beyond:
            counts.append(max(2, 2 * self._cores))
        needed = math.ceil(_SPARE * first.work / first.train) if first.train > 0 else top + 1
        if 1 < needed <= (top if known and waits else self._cores):  # it can keep up
            counts = sorted({needed, *(count for count in counts if count > needed)})
        if self.length is not None:
            counts = [count for count in counts if count <= max(2, self.length)]
        return counts

    def _choose(self) -> Setting:
        """The best of those that were tried, or inline without a trial."""
        good = [one for one in self.results if not one.error and one.samples] or self.results[:1]
        best = max(map(self._rate, good))
        as_good = [one for one in good if self._rate(one) >= _AS_GOOD * best]
        chosen = min(as_good, key=lambda one: (max(1, one.setting.workers), _LEAVES[one.setting.executor]))
        self.why = f"{_rate(chosen.rate)} samples/s, waiting {chosen.waiting:.0%}"
        if self._inline == "trust" and self._inline_seconds() <= _SURE * self._best_seconds():
            self.why = f"{_rate(1 / self._inline_seconds())} samples/s by what the workers told"
            return INLINE
        return chosen.setting

    def _rate(self, one: Measured) -> float:
        """Samples/s, with what starting workers takes from every pass."""
        if one.error or not one.samples:
            return 0.0
        seconds = one.seconds / one.samples
        if self.length and one.starts and not self._persistent:
            seconds += one.start / one.starts / (self.length * one.samples / one.batches)
        return 1 / seconds

    def _best_seconds(self) -> float:
        best = max(map(self._rate, self.results))
        return 1 / best if best > 0 else math.inf

    def _inline_seconds(self) -> float:
        """Of a sample, inline: its work, by a worker that has had the machine almost for itself, and the training."""
        told = next((one for one in self.results if one.samples), None)
        if told is None:
            return math.inf
        return (told.work + told.train + self._overhead * told.batches) / told.samples


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
        self, setting: Setting, depth: int, before: Measured | None, now: float, least: float, warm: float = _WARM
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


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.3g}"
