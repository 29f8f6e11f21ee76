"""Measure the whole pipeline with one executor and some workers: at full speed, or beside a training step."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable
from contextlib import closing

from penstock.loader.autotune import Throughput
from penstock.loader.messages import BatchMetrics, BatchRequest
from penstock.tools.profiling.probe import Probe
from penstock.tools.profiling.result import Moment, Rehearsal, Setting, Trial

__all__ = ["rehearse", "try_out"]

_MOMENTS = 5000  # largest number of batches that a page can show
_HARD = 3  # a measurement stops after this multiple of the planned time


def try_out(
    probe: Probe,
    setting: Setting,
    requests: Iterable[BatchRequest],
    seconds: float,
    *,
    cached: bool,
) -> Trial:
    """Build batches at full speed for about ``seconds``, at most three times as long.

    Args:
        requests: an endless series of batches to build; ignored for a stream.
        cached: whether the samples were read before; stored in the result.

    An error is stored in the result, because it shows that the setting cannot make these batches.
    """
    found, first, skip, last = Throughput(max(1, setting.workers)), 0.0, -1, 0.0
    try:
        with closing(_epochs(probe, setting, requests)) as batches:
            for number, at, metrics in batches:
                if number == 1:
                    # Workers deliver in bursts. Batches count after the first burst, unless epochs are too short.
                    skip = found.workers if skip < 0 or found.batches else 0
                    first, last = at, 0.0
                if number > skip:
                    found.batches += 1
                    found.wait += at - last
                    found.metrics.add(metrics)
                last, full = at, number % found.workers == 0 and found.batches >= 2 * found.workers
                if found.wait >= (seconds if full else _HARD * seconds):
                    break
    except Exception as error:  # any error from the dataset, from starting processes or from pickling
        text = str(error).strip().partition("\n")[0]
        return Trial(setting, cached, error=f"{type(error).__name__}: {text}" if text else type(error).__name__)
    each = {name: spent / max(1, found.metrics.samples) for name, spent in found.metrics.by_stage().items()}
    return Trial(setting, cached, found.rate(), found.batches, first, each)


def _epochs(
    probe: Probe, setting: Setting, requests: Iterable[BatchRequest]
) -> Generator[tuple[int, float, BatchMetrics], None, None]:
    """Yield the batches of epoch after epoch: the number, from 1, and the seconds since its epoch began."""
    number = 1
    while number:
        number, began = 0, time.perf_counter()
        with closing(probe.run(setting.executor, setting.workers, requests)) as arrivals:
            for arrival in arrivals:
                number, at, metrics = number + 1, arrival.had - began, arrival.result.metrics
                del arrival
                yield number, at, metrics


def rehearse(
    probe: Probe, setting: Setting, requests: Iterable[BatchRequest], seconds: float, *, step: float, cached: bool
) -> Rehearsal:
    """Consume batches like a training with steps of ``step`` seconds, for ``seconds`` and at least a few batches."""
    moments: list[Moment] = []
    few, start = 2 * max(1, setting.workers), time.perf_counter()
    with closing(probe.run(setting.executor, setting.workers, requests)) as arrivals:
        for arrival in arrivals:
            moments.append(Moment(arrival.asked - start, arrival.had - start, arrival.ready))
            limit = seconds if len(moments) > few else _HARD * seconds
            if len(moments) == _MOMENTS or time.perf_counter() - start >= limit:
                break
            time.sleep(step)
            del arrival
    return Rehearsal(setting, step, cached, moments, settled=min(len(moments) // 2, few))
