"""Measure the whole pipeline with one executor and some workers: at full speed, or beside a training step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import closing

from penstock.loader.messages import BatchRequest
from penstock.loader.throughput import ThroughputMeter
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
    meter = ThroughputMeter(setting.workers, seconds=seconds, limit=_HARD * seconds)
    try:
        while _pass(probe, setting, requests(), meter):
            pass
    except Exception as error:  # any error from the dataset, from starting processes or from pickling
        text = str(error).strip().partition("\n")[0]
        return Trial(setting, cached, error=f"{type(error).__name__}: {text}" if text else type(error).__name__)
    found = meter.found
    each = {name: spent / max(1, found.samples) for name, spent in found.metrics.by_stage().items()}
    return Trial(setting, cached, found.rate, found.batches, meter.first, each)


def _pass(probe: Probe, setting: Setting, requests: Iterable[BatchRequest], meter: ThroughputMeter) -> bool:
    """Measure one epoch; return whether another one is needed."""
    meter.begin(time.perf_counter())
    had_any = False
    with closing(probe.run(setting.executor, setting.workers, requests)) as arrivals:
        for arrival in arrivals:
            had_any, metrics, asked, had = True, arrival.result.metrics, arrival.asked, arrival.had
            del arrival
            if meter.add(metrics, asked, had):
                return False
    meter.end()  # the stream has ended
    return had_any and not meter.enough


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
