"""`profile`: the whole measurement, within a time limit."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader as TorchDataLoader

from penstock.cores import cores, ticks
from penstock.errors import ConfigError
from penstock.loader.config import EXECUTORS, LoaderConfig
from penstock.loader.messages import BatchRequest
from penstock.tools.profiling.advice import choose, judge, restated, storage_matters
from penstock.tools.profiling.alone import Account, account, drop_from_page_cache, one_thread
from penstock.tools.profiling.probe import Probe, as_penstock_loader, preserved_loader_generators
from penstock.tools.profiling.result import Profile, Setting, Stage, Trial
from penstock.tools.profiling.together import rehearse, try_out

__all__ = ["profile", "worker_counts"]

_FIRST, _AGAIN, _TRIALS, _NEW, _REHEARSAL = 0.12, 0.12, 0.46, 0.1, 0.2  # shares of the time
_SAMPLES = 4096  # largest number of samples measured alone, enough even for very fast ones
_BATCHES = 64  # largest number of batches measured alone
_PLANNED = 4  # plan this many times the samples, so that later trials have new ones
_WAITS = 0.5  # try more workers than cores if stages wait for at least this share
_SHORTEST = 0.2  # shortest trial in seconds


def profile(
    loader: TorchDataLoader[Any],
    *,
    seconds: float = 20.0,
    step: float | None = None,
    executors: Sequence[str] | None = None,
    name: str = "",
    progress: Callable[[int, int], object] | None = None,
) -> Profile:
    """Measure a loader's pipeline on this machine: each stage alone, all together, and beside a training step.

    Args:
        loader: of Penstock or torch. It is not changed, and must not be iterating.
        seconds: approximate duration, without starting workers; a batch in progress is finished.
        step: seconds of a training step, without waiting. None: training takes no time.
        executors: executors to try besides inline: "auto", "process", "thread". By default the safe ones: threads only
            if the dataset sets ``pure = True``, or if the loader uses threads already.
        name: title of the report.
        progress: called with the elapsed and the total milliseconds.

    Raises:
        ConfigError: seconds that are not positive and finite, a negative step, an unknown executor, or a loader
            without batches.
        Exception: any error of the dataset.
    """
    if not 0 < seconds < math.inf or (step is not None and not 0 <= step < math.inf):
        raise ConfigError(
            f"seconds={seconds} must be positive, step={step} must not be negative, and both must be finite"
        )
    unknown = [one for one in executors or () if one not in EXECUTORS or one in ("inline", "ray")]
    if unknown:
        raise ConfigError(f"unknown executor {unknown[0]!r}: use 'auto', 'process' or 'thread'")
    start = time.perf_counter()
    ours = as_penstock_loader(loader)
    with preserved_loader_generators(ours), one_thread():
        session = _Session(
            Probe(ours, batches=_PLANNED * _SAMPLES, samples=_PLANNED * _SAMPLES), seconds, step, executors, progress
        )
        found = session.measure(name or type(loader.dataset).__name__)
    found = replace(found, seconds=time.perf_counter() - start)
    return replace(found, verdict=replace(found.verdict, sentences=restated(found)))


def worker_counts(cores: int, waiting: float) -> list[int]:
    """Return the numbers of workers to try, given the share of time in which stages wait."""
    counts = {1, 2, cores} if cores <= 4 else {1, max(2, cores // 4), cores // 2, cores}
    if waiting > _WAITS:
        counts |= {2 * cores, 4 * cores}
    return sorted(counts)


class _Session:
    """One measurement."""

    def __init__(
        self,
        probe: Probe,
        seconds: float,
        step: float | None,
        executors: Sequence[str] | None,
        progress: Callable[[int, int], object] | None,
    ) -> None:
        self.probe = probe
        self.seconds = seconds
        self.step = step
        self.executors = probe.executors() if executors is None else list(dict.fromkeys(executors))
        self.cores = cores()
        self.dropped = 0
        self._progress = progress
        self._passed = 0.0
        if not probe.stream and not probe.requests:
            raise ConfigError(
                f"{type(probe.samples).__name__}: the loader has no batches, so there is nothing to measure"
            )
        self.requests, self.size = self._divided()
        self._next = 0  # index of the first request not yet used

    def measure(self, name: str) -> Profile:
        """Run the whole measurement."""
        alone = self._limited(self.requests)
        self.dropped = drop_from_page_cache(self.probe, alone)
        first = self._account(alone, _FIRST)
        if not first.samples:
            raise ConfigError(f"{name}: the dataset yields nothing, so there is nothing to measure")
        self._next = first.batches
        load = _Load()
        again = self._account(alone[: first.batches], _AGAIN)
        others = load.others(self.cores)
        trials = self._trials(again.waiting)
        stages = self._stages(first, again, trials)
        needed = self.probe.batch_size / self.step if self.step else None
        chosen = choose(trials, needed=needed)
        if storage_matters(stages):
            new = self._new_samples(chosen.setting, first.waiting)
            trials += new
            chosen = choose(new, needed=needed)
        requests, cached = self._new(), not storage_matters(stages)
        step = (self.step or 0.0) * self.size / self.probe.batch_size  # scaled to the measured part of a batch
        rehearsal = rehearse(
            *(self.probe, chosen.setting, requests, _REHEARSAL * self.seconds), step=step, cached=cached
        )
        self._done(_REHEARSAL)
        given = _setting_of(self.probe.config)
        verdict = judge(
            *(stages, chosen),
            batch_size=self.probe.batch_size,
            step=self.step or None,
        )
        return Profile(
            *(name, self.cores, self.probe.batch_size, self.size, again.samples, self.dropped, given),
            *(stages, trials, rehearsal, verdict, others, 0.0),
        )

    def _divided(self) -> tuple[list[BatchRequest], int]:
        """Return the requests to measure and their size: whole batches, or parts of batches.

        A part takes at most a quarter of the time for measuring alone.
        """
        size, requests = self.probe.batch_size, self.probe.requests
        if self.probe.stream or size == 1:
            return requests, size
        fetcher, last = self.probe.fetcher(), requests[-1]
        for at in range(2):  # the first batch opens files and imports modules
            tried = account(fetcher, [last.part(at % last.size, at % last.size + 1)], 0.0)
        each = sum(map(tried.each, tried.wall))
        most = max(1, int(_AGAIN * self.seconds / 4 / each)) if each > 0 else size
        if most >= size:
            return requests, size
        parts = (request.part(at, at + most) for request in requests for at in range(0, request.size, most))
        cut = list(itertools.islice(parts, _PLANNED * _SAMPLES))
        return cut, most

    def _limited(self, requests: list[BatchRequest]) -> list[BatchRequest]:
        """Return the first requests: as many as a measurement needs."""
        if self.probe.stream:
            return []
        return requests[: max(_BATCHES, _SAMPLES // self.size)]

    def _account(self, requests: list[BatchRequest], share: float) -> Account:
        limit = self.seconds * share
        endless: Iterable[BatchRequest] = requests
        if self.probe.stream:
            endless = itertools.repeat(BatchRequest([], []), max(_BATCHES, _SAMPLES // self.size))
        found = account(self.probe.fetcher(), endless, limit, done=self._show)
        self._done(share)
        return found

    def _trials(self, waiting: float) -> list[Trial]:
        """Try inline and the executors with workers, on cached samples."""
        seen = self.requests[: max(1, self._next)]
        settings = [Setting("inline", 0)]
        for count in worker_counts(self.cores, waiting):
            for executor in self.executors:
                if executor == "process" and count == 1 and "auto" in self.executors:
                    continue  # the same as "auto": one process with one thread
                settings.append(Setting(executor, count))
        given = _setting_of(self.probe.config)
        if given not in settings and given.executor != "ray":
            settings.append(given)
        share = _TRIALS / len(settings)
        trials = []
        for setting in settings:
            limit = max(_SHORTEST, share * self.seconds)
            trials.append(try_out(self.probe, setting, itertools.cycle(seen), limit, cached=True))
            self._done(share)
        if all(trial.error for trial in trials):
            raise ConfigError(f"no executor can make batches of this loader: {trials[0].error}")
        return trials

    def _new_samples(self, setting: Setting, waiting: float) -> list[Trial]:
        """Try the chosen setting and more workers, on new samples."""
        settings = [setting]
        if self.executors:
            executor = setting.executor if setting.workers else self.executors[0]
            counts = worker_counts(self.cores, waiting) if waiting > _WAITS else [self.cores]
            settings += [Setting(executor, count) for count in counts if count > setting.workers]
        limit = max(_SHORTEST, _NEW * self.seconds / len(settings))
        return [try_out(self.probe, one, self._new(), limit, cached=False) for one in settings]

    def _new(self) -> Iterator[BatchRequest]:
        """Yield requests for new samples, then start over, with the files dropped from the page cache."""
        if self.probe.stream:
            return iter(())
        begin, count = self._next % len(self.requests), len(self.requests)
        ahead = self._limited([self.requests[(begin + k) % count] for k in range(count)])
        self.dropped += drop_from_page_cache(self.probe, ahead)
        return self._counted(begin)

    def _counted(self, begin: int) -> Iterator[BatchRequest]:
        for number in itertools.count(begin):
            self._next = number + 1
            yield self.requests[number % len(self.requests)]

    def _stages(self, first: Account, again: Account, trials: list[Trial]) -> list[Stage]:
        most = [t for t in trials if t.setting.workers == self.cores and t.setting.executor != "thread" and t.rate]
        separate = [trial for trial in most if trial.setting.executor == "process"] or most
        together = separate[0].stages if separate else {}
        names = dict.fromkeys([*again.wall, *first.wall])
        return [
            Stage(name, first.each(name), again.each(name), together.get(name), again.waits(name), first.waits(name))
            for name in names
        ]

    def _show(self, seconds: float) -> None:
        if self._progress is not None:
            self._progress(int(1000 * (self._passed + seconds)), int(1000 * self.seconds))

    def _done(self, share: float) -> None:
        self._passed += share * self.seconds
        self._show(0.0)


class _Load:
    """Measures, from its creation on, how busy other programs keep the cores."""

    def __init__(self) -> None:
        self._ticks, self._mine = ticks(), time.process_time()
        self._start = time.perf_counter()

    def others(self, count: int) -> float:
        """Return how many cores other programs used; 0 if the system does not report it, or after too short a time."""
        before, now, passed = self._ticks, ticks(), time.perf_counter() - self._start
        if before is None or now is None or now[1] <= before[1] or passed < _SHORTEST:
            return 0.0
        busy = count * (now[0] - before[0]) / (now[1] - before[1])
        return max(0.0, busy - (time.process_time() - self._mine) / passed)


def _setting_of(config: LoaderConfig) -> Setting:
    """Return a loader's setting, in terms of its arguments."""
    if config.kind == "process" and config.workers == 1 and config.threads > 1:
        return Setting("auto", config.threads)
    return Setting(config.kind, config.workers)
