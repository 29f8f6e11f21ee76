"""Measure the whole pipeline with one executor and some workers: at full speed, or beside a training step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, field

from penstock.loader.messages import BatchMetrics, BatchRequest
from penstock.tools.profiling.probe import Probe
from penstock.tools.profiling.result import Moment, Rehearsal, Setting, Trial

__all__ = ["rehearse", "try_out"]

_MOMENTS = 5000  # largest number of batches that a page can show
_HARD = 3  # a measurement stops after this multiple of the planned time


def try_out(
    probe: Probe,
    setting: Setting,
    requests: Callable[[], Iterable[BatchRequest]],
    seconds: float,
    *,
    cached: bool,
) -> Trial:
    """Build batches at full speed for about ``seconds``, at most three times as long.

    Args:
        requests: returns an endless series of batches to build; ignored for a stream.
        cached: whether the samples were read before; stored in the result.

    An error is stored in the result, because it shows that the setting cannot make these batches.
    """
    found = _Measured()
    try:
        while _pass(probe, setting, requests(), seconds, found):
            pass
    except Exception as error:  # any error from the dataset, from starting processes or from pickling
        text = str(error).strip().partition("\n")[0]
        return Trial(setting, cached, error=f"{type(error).__name__}: {text}" if text else type(error).__name__)
    samples, rate = found.work.samples, found.work.samples / found.seconds if found.seconds > 0 else 0.0
    each = {name: spent / max(1, samples) for name, spent in found.work.by_stage().items()}
    return Trial(setting, cached, rate, found.batches, found.first, each)


@dataclass
class _Measured:
    """The batches that were measured so far, and the seconds to the first batch of the last pass."""

    batches: int = 0
    seconds: float = 0.0
    first: float = 0.0
    work: BatchMetrics = field(default_factory=BatchMetrics)


def _pass(probe: Probe, setting: Setting, requests: Iterable[BatchRequest], seconds: float, found: _Measured) -> bool:
    """Measure one epoch; return whether another one is needed.

    Batches arrive in bursts of one per worker. So they count after the first ones of all workers, in at least two full
    rounds of all workers, unless time is up. If an epoch is too short for that, all of its batches count.
    """
    workers, number, early = max(1, setting.workers), 0, BatchMetrics()
    began = last = time.perf_counter()
    with closing(probe.run(setting.executor, setting.workers, requests)) as arrivals:
        for arrival in arrivals:
            now, metrics = arrival.had, arrival.result.metrics
            del arrival
            number += 1
            if number == 1:
                found.first = now - began
            if number <= workers:
                early.add(metrics)
            else:
                found.batches += 1
                found.seconds += now - last
                found.work.add(metrics)
                full = number % workers == 0 and found.batches >= 2 * workers
                if found.seconds >= (seconds if full else _HARD * seconds):
                    return False
            last = now
    if number <= workers:
        found.batches += number
        found.seconds += last - began
        found.work.add(early)
    return number > 0 and (found.seconds < seconds or found.batches < 2 * workers)


def rehearse(
    probe: Probe, setting: Setting, requests: Iterable[BatchRequest], seconds: float, *, step: float, cached: bool
) -> Rehearsal:
    """Consume batches like a training with steps of ``step`` seconds, for ``seconds`` and at least a few batches."""
    moments: list[Moment] = []
    start = time.perf_counter()
    with closing(probe.run(setting.executor, setting.workers, requests)) as arrivals:
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
