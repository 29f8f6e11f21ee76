"""`Ladder`: which executor and how many workers, found by trying a few of them, one after the other. No processes here.

    1 process    --> 2 processes --> 2 threads --> 4 ... --> inline         a rung: batches of the run itself, measured
      waits?          more?            more?      no more    as quick?      enough, or no more to be had: chosen

Rules: a setting under which the run waits for less than 5 % of its time is enough, and nothing larger is tried. Else
the number of workers grows as long as that pays. Of settings that are within 5 % of the best one, that with the fewest
workers is chosen, then the one that leaves most to the training. Batches are made inline where that takes less than
handing them over. Of cheap batches, and on few cores, settings differ by less than a new process and an old one: those
that came close to the best one are measured again, later after their start, and the better figure counts.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import Any

from penstock.loader.tally import ENOUGH, INLINE, LEAVES, WARM, Measured, Setting, Tally, rate_text

__all__ = ["Ladder", "worker_counts"]

_WAITS = 0.5  # share of waiting from which more workers than cores are tried
_AS_GOOD = 0.95
_GAIN, _LARGE_GAIN = 1.05, 1.25  # that a rung has to bring for another one; the second beyond the cores
_SPARE = 1.1  # workers, over those that would just keep up
_SURE = 0.9  # of the seconds of the best: then inline is chosen untried, where trying it is not safe
_MOST = 64  # workers of all ranks here, if there are not more cores
_CHEAP = 1e-3  # seconds of a batch, below which handing over limits and not the cores
_FEW = 4  # cores, of which the training's own process takes a share that counts
_CLOSE, _NEAR = 0.6, 0.85  # of the best rate: good enough for another look, the first if batches are cheap
_TELLING = 64  # batches by which it is known whether a data set computes or waits: one in 16 is measured
_LEAST = 0.8  # seconds of a rung
_WARM_AGAIN = 0.6  # seconds that are passed over: several processes become faster for half a second


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
        ranks: of the job on this machine, which tune at the same time: each takes its share of everything.
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
        ranks: int = 1,
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
        self.ranks = ranks
        self._cores = max(1, cores // ranks)
        self._most = max(_MOST // ranks, self._cores)
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
        elif result.error or self._rate(result) > self._rate(self.results[again]):
            self.results[again] = result  # other programs, and being new, only make it slower
        self.kept = None
        try:
            self.current = self._steps.send(result)
        except StopIteration:
            self.current, self.decided = self._choose(), True

    def tally(self, depth: int, now: float) -> Tally:
        """Measures the current setting from now on."""
        again = any(one.setting == self.current for one in self.results)
        return Tally(self.current, depth, self.kept, now, self._seconds, _WARM_AGAIN if again else WARM)

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
        enough = first.waiting < ENOUGH
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
                if found[-1].waiting < ENOUGH:
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
        if first.error:
            return []
        cheap = first.seconds < _CHEAP * first.batches
        most = max(one.setting.workers for one in self.results)
        if not cheap and (self._cores > _FEW or most > 2 * self._cores):
            return []
        close = [one for one in self.results if self._rate(one) >= (_CLOSE if cheap else _NEAR) * top]
        return [one.setting for one in close] if len(close) > 1 else []

    def _counts(self, first: Measured) -> list[int]:
        """Numbers of workers to try after the first one: up to the cores; twice as many where batches are cheap, and
        again and again unless the data set only computes; of few cores, once in any case. Fewer than the training needs
        are left out.
        """
        top = self._most
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
        chosen = min(as_good, key=lambda one: (max(1, one.setting.workers), LEAVES[one.setting.executor]))
        self.why = f"{rate_text(chosen.rate)} samples/s, waiting {chosen.waiting:.0%}"
        if self._inline == "trust" and self._inline_seconds() <= _SURE * self._best_seconds():
            told = f"{rate_text(1 / self._inline_seconds())} samples/s by what the workers told"
            self.why = told if any(one.samples for one in good) else "no workers can be had"
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
        first = next((one for one in self.results if one.samples), None)
        if first is None:
            return math.inf
        return (first.work + first.train + self._overhead * first.batches) / first.samples
