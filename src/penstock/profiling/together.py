"""The pipeline together: batches by one executor and a number of workers, as fast as it can, or beside a training.

worker 0  |--0--|--2--|--4--|       counted from the first batch of every worker on, in rounds: after so many
worker 1  |--1--|--3--|--5--|       batches as there are workers, as much is under way as there was before
                ^ here      ^ and here
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import closing

from penstock.loader.probe import Probe
from penstock.loader.work import Task, Work
from penstock.profiling.result import Moment, Rehearsal, Setting, Trial

__all__ = ["rehearse", "stages_of", "try_out"]

_MOMENTS = 5000  # batches of a rehearsal at most: a page can show no more
_HARD = 3  # times as long as it should take: then what there is has to do


class _Tally:
    """What a trial has counted, over the passes of a short stream."""

    def __init__(self, workers: int, seconds: float) -> None:
        self.round = max(1, workers)
        self.limit = seconds
        self.work = Work()
        self.samples = self.batches = 0
        self.seconds = self.first = 0.0

    def over(self, seconds: float) -> bool:
        return self.seconds + seconds >= self.limit

    @property
    def rate(self) -> float:
        return self.samples / self.seconds if self.seconds > 0 else 0.0


def try_out(
    probe: Probe,
    setting: Setting,
    tasks: Callable[[], Iterable[Task]],
    seconds: float,
    *,
    cached: bool,
) -> Trial:
    """Make batches as fast as a setting can for about so many seconds, three times that at most.

    Args:
        tasks: gives what is to be made, endless; of a stream it says nothing.
        cached: what is said of the samples in the result.

    An error is a result: the setting cannot make these batches, and says why.
    """
    tally = _Tally(setting.workers, seconds)
    try:
        while _pass(probe, setting, tasks(), tally):
            pass
    except Exception as error:  # whatever a data set, starting processes or pickling raises
        text = str(error).strip().partition("\n")[0]
        return Trial(setting, cached, error=f"{type(error).__name__}: {text}" if text else type(error).__name__)
    each = {name: spent / max(1, tally.work.samples) for name, spent in stages_of(tally.work).items()}
    return Trial(setting, cached, tally.rate, tally.batches, tally.first, each)


def _pass(probe: Probe, setting: Setting, tasks: Iterable[Task], tally: _Tally) -> bool:
    """Count one pass; whether there is to be another one."""
    began = start = time.perf_counter()
    samples = everything = batches = 0  # since the start, in full rounds; all; batches since the start
    rounds = (0.0, 0, 0)
    number = 0
    with closing(probe.run(setting.executor, setting.workers, tasks)) as arrivals:
        for number, arrival in enumerate(arrivals, 1):
            had, work = arrival.had, arrival.made.work
            del arrival
            everything += work.samples
            tally.first = tally.first or had - began
            if number <= tally.round:  # the first one of each worker
                start = had
                continue
            tally.work.add(work)
            samples, batches = samples + work.samples, batches + 1
            passed = had - start
            if number % tally.round == 0 or passed >= _HARD * tally.limit:
                rounds = (passed, samples, batches)
                if tally.over(passed):
                    break
        else:  # the stream has ended
            if not rounds[2]:
                rounds = (time.perf_counter() - began, everything, number)
    tally.seconds += rounds[0]
    tally.samples += rounds[1]
    tally.batches += rounds[2]
    return number > 0 and not tally.over(0.0)


def rehearse(
    probe: Probe, setting: Setting, tasks: Iterable[Task], seconds: float, *, step: float, cached: bool
) -> Rehearsal:
    """Take batches as a training does that needs ``step`` seconds for each, for so many seconds or a few batches."""
    moments: list[Moment] = []
    start = time.perf_counter()
    with closing(probe.run(setting.executor, setting.workers, tasks)) as arrivals:
        for arrival in arrivals:
            moments.append(Moment(arrival.asked - start, arrival.had - start, arrival.ready))
            passed = time.perf_counter() - start
            if (
                len(moments) == _MOMENTS
                or passed >= _HARD * seconds
                or (passed >= seconds and len(moments) > 2 * max(1, setting.workers))
            ):
                break
            time.sleep(step)
            del arrival
    settled = min(len(moments) // 2, 2 * max(1, setting.workers))
    return Rehearsal(setting, step, cached, moments, settled)


def stages_of(work: Work) -> dict[str, float]:
    """Seconds of work by stage, each for itself."""
    named = dict(work.stages)
    rest = max(0.0, work.fetch - sum(named.values())) + named.pop("fetch", 0.0)
    return {"fetch": rest, **named, "collate": work.collate, "hand-over": work.hand_over}
