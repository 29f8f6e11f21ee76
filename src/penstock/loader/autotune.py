"""`Autotuner`: chooses the number of workers for ``num_workers="auto"`` with a doubling search in the run itself.

    1 worker  -->  2  -->  4 ...  -->  chosen: the fewest within 5 % of the fastest, or inline, estimated from 1 worker
       waits?             1.1x?

The executor follows from the settings and the dataset's declarations; only the number of its workers is searched. It
doubles while the run waits for more than 5 % of its time, two doublings make it at least 10 % faster, and this rank's
share of cores and memory is not used up. Each number makes the next batches of the run, so none is made twice.

Batches arrive in bursts of one per worker, so a number is measured in rounds of one batch per worker. Pauses of the
program (validation, a checkpoint) do not count.

This module starts no processes. `penstock.DataLoader` gives it the batches, and its workers the number it asks for.
"""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.cores import cores
from penstock.distributed import local_ranks
from penstock.errors import ConfigError
from penstock.loader.config import AUTO, LoaderConfig
from penstock.loader.messages import BatchMetrics, BatchResult
from penstock.loader.statistics import size_of
from penstock.memory import available_memory, private_memory
from penstock.plan.user_states import has_state
from penstock.samplers.base import PlanSampler
from penstock.samplers.batch import layers
from penstock.samplers.identity import parts_of
from penstock.wording import rate_text

if TYPE_CHECKING:
    from penstock.loader.consumer import Consumer
    from penstock.loader.window import Window

__all__ = ["ENOUGH", "Autotuner", "Throughput", "autotuner_of"]

ENOUGH = 0.05
"""Share of waiting time below which a faster loader gains less than about this share."""

# Speed-up that two doublings must achieve.
_GAIN = 1.1
_AS_GOOD = 0.95
# An estimated rate counts only in part, because it was not measured.
_UNSURE = 0.9
# Workers of all ranks of a machine with fewer cores, for datasets that wait for storage.
_MOST = 64
# Batches, or seconds of fetching, needed to decide whether a dataset computes or waits. One in 16 quick batches is
# measured, and each that takes a millisecond or more.
_TELLING, _TELLING_SECONDS = 64, 0.1
# A dataset that uses the CPU for this share of its time computes.
_COMPUTES = 0.5
# Seconds to measure a number of workers, if they have two rounds. One round is enough if it takes this many times that.
_SECONDS, _LONG = 0.8, 3
# A training step is a pause if it takes this many seconds and this many times the average.
_PAUSE, _LONGER = 0.5, 20


@dataclass
class Throughput:
    """A number of workers, and the batches that it made for a consumer.

    Attributes:
        workers: the number; 0 is inline.
        batches: number of measured batches.
        wait: seconds in the loader.
        train: seconds between a batch and the next request.
        metrics: metrics of these batches, of all workers together.
        error: why the number does not work.
        estimated: whether nothing was measured.
    """

    workers: int
    batches: int = 0
    wait: float = 0.0
    train: float = 0.0
    metrics: BatchMetrics = field(default_factory=BatchMetrics)
    error: str = ""
    estimated: bool = False

    @property
    def seconds(self) -> float:
        """Seconds of the consumer."""
        return self.wait + self.train

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.metrics.samples / self.seconds if self.seconds > 0 else 0.0

    @property
    def waiting(self) -> float:
        """Share of time that the consumer waited."""
        return self.wait / self.seconds if self.seconds > 0 else 1.0


class Autotuner:
    """Tries numbers of workers until one is chosen.

    Args:
        executor: the executor, for reports.
        inline: whether inline may be chosen. Its speed is estimated from one worker, because files that it opens would
            be shared by workers that are forked later.
        cores: cores of this machine.
        ranks: ranks of the job on this machine, which tune at the same time; each uses its share of cores and memory.
        starts: whether each epoch starts workers, so that the time for it matters.

    Attributes:
        workers: the number to use now; 0 is inline.
        chosen: the number chosen; None before.
        why: reason of the choice, in words.
        memory_for: number of workers that fit into memory; None if unknown.
        length: number of batches per epoch; None if unknown.
    """

    def __init__(self, executor: str, *, inline: bool, cores: int, ranks: int = 1, starts: bool = False) -> None:
        self.workers = 1
        self.chosen: int | None = None
        self.why = ""
        self.memory_for: int | None = None
        self.length: int | None = None
        self._executor = executor
        self._inline = inline
        self._cores = max(1, cores // ranks)
        self._most = max(_MOST // ranks, self._cores)
        self._ranks = ranks
        self._starts = starts
        self._start = 0.0  # seconds to start workers
        self._window: weakref.ref[Window] | None = None
        self._now = Throughput(1)
        self._skip = 0  # number of batches that do not count
        self._began: float | None = None  # time of the start of an iterator, until its first batch
        self._last = 0.0  # time of the last delivery
        self._tried: list[Throughput] = []

    # The batches of the run.

    def begin(self, window: Window, now: float, length: int | None) -> None:
        """Measure an epoch iterator, which began at a time. Older ones are not measured any more."""
        self.length = length
        self._window = weakref.ref(window)
        self._began = self._last = now
        # The first steps of the training, which may compile a model, do not count, unless the epoch is short.
        self._skip = 2 if length is None else min(2, length // 4)

    def add(self, window: Window, result: BatchResult, asked: float, had: float) -> bool:
        """Add a batch, with the times of its request and delivery. Return whether another number should be used."""
        if self.chosen is not None or self._window is None or window is not self._window():
            return False
        if not self._measure(result.metrics, asked, had, window.depth):
            return False
        if (free := available_memory()) is not None:
            # How many workers like these fit into half of this rank's share.
            pids = [process.pid for process in window.executor.processes or ()]
            used = (private_memory(pids[0]) * len(pids) if pids else 0) + window.depth * size_of(result.batch)
            self.memory_for = self.workers + int(free / self._ranks / 2 / (max(1, used) / self.workers))
        self.note(self._now)
        # The batches in flight, and the first ones of new workers, do not count.
        self._skip = window.depth + self.workers
        return True

    def _measure(self, metrics: BatchMetrics, asked: float, had: float, depth: int) -> bool:
        """Count a batch, and return whether the measurement is enough. After a pause ``depth`` batches are ready."""
        now, train = self._now, asked - self._last
        self._last = had
        if self._began is not None:
            # The start of the workers is no step of the training.
            self._start, train, self._began = self._start or had - self._began, 0.0, None
        if now.batches and train > max(_PAUSE, _LONGER * now.train / now.batches):
            self._skip, train = depth + now.workers, 0.0
        if self._skip:
            self._skip -= 1
            return False
        now.batches += 1
        now.wait += had - asked
        now.train += train
        now.metrics.add(metrics)
        # They keep samples alive.
        now.metrics.failures.clear()
        rounds = 1 if now.seconds >= _LONG * _SECONDS else 2
        whole = now.batches % now.workers == 0 and now.batches >= rounds * now.workers
        return whole and now.seconds >= _SECONDS

    # The search.

    def note(self, found: Throughput) -> None:
        """Record the result of the current number of workers, or why it does not work, and set the next one."""
        self._tried.append(found)
        # One bad measurement, while the machine was busy, must not end the search.
        *before, last, this = [0.0, 0.0, *map(self._rate, self._tried)]
        faster = max(last, this) >= _GAIN * max(before, default=0.0)
        # Twice as many workers, or this rank's limit.
        count = min(2 * self.workers, self.limit)
        if found.waiting < ENOUGH or found.error or not faster or count < _GAIN * self.workers:
            self._choose()
        else:
            self.workers = count
            self._now = Throughput(count)

    def fail(self, error: Exception) -> None:
        """Record that the current number of workers does not work, and choose one that does."""
        self.note(Throughput(self.workers, error=f"{type(error).__name__}: {error}"))

    @property
    def limit(self) -> int:
        """Maximum number of workers of this rank."""
        # Whether the dataset is known to use the CPU, measured with one worker.
        found = self._tried[0]
        telling = found.metrics.fetch >= _TELLING_SECONDS or found.batches >= _TELLING
        computes = telling and found.metrics.cpu >= _COMPUTES * found.metrics.fetch
        limit = self._cores if computes else self._most
        limit = limit if self.memory_for is None else min(limit, self.memory_for)
        return limit if self.length is None else min(limit, max(2, self.length))

    def _choose(self) -> None:
        good = [one for one in self._tried if not one.error]
        if self._inline and good[0].waiting >= ENOUGH:
            one = good[0]
            work = one.metrics.fetch + one.metrics.collate
            good.insert(0, Throughput(0, one.batches, work, one.train, one.metrics, estimated=True))
            self._tried.append(good[0])
        best = max(map(self._rate, good))
        chosen = next(one for one in good if self._rate(one) >= _AS_GOOD * best)
        self.workers = self.chosen = chosen.workers
        if not chosen.workers:
            reason = "no number of workers is faster"
        elif chosen.waiting < ENOUGH:
            reason = "more workers would gain almost nothing"
        elif chosen.workers >= self.limit:
            reason = "this rank may have no more workers"
        else:
            reason = "more workers are not faster"
        waits = "estimated from one worker" if chosen.estimated else f"waiting {chosen.waiting:.0%}"
        self.why = f"{rate_text(chosen.rate)} samples/s, {waits}; {reason}"

    def _rate(self, one: Throughput) -> float:
        """Return samples/s, including the time to start workers in every epoch."""
        samples = one.metrics.samples
        if one.error or not samples:
            return 0.0
        seconds = one.seconds / samples
        if self.length and self._starts and one.workers:
            seconds += self._start / (self.length * samples / one.batches)
        return (_UNSURE if one.estimated else 1.0) / seconds if seconds > 0 else math.inf

    def stats(self) -> dict[str, Any]:
        """Return the results so far as plain numbers and text."""
        tried = [
            {
                **self._named(one.workers),
                "batches": one.batches,
                "samples_per_second": one.rate,
                "wait_share": one.waiting,
                "estimated": one.estimated,
                "error": one.error,
            }
            for one in self._tried
        ]
        return {"chosen": None if self.chosen is None else self._named(self.chosen), "why": self.why, "tried": tried}

    def _named(self, workers: int) -> dict[str, Any]:
        return {"executor": self._executor if workers else "inline", "workers": workers}


def autotuner_of(consumer: Consumer, config: LoaderConfig) -> Autotuner:
    """Return an autotuner for a loader.

    Raises:
        ConfigError: the batches would depend on the workers, or there are no workers to choose.
    """
    name = type(consumer.dataset).__name__
    auto = "num_workers='auto'"
    if config.executor == "ray":
        raise ConfigError(f"{auto} counts workers on this machine: for executor='ray' pass a number")
    if consumer.plan is None:
        raise ConfigError(
            f"{auto} is not possible for {name}: the samples of an iterable dataset depend on the number of workers, "
            "so pass a number, or make the dataset map-style"
        )
    # Each worker has a separate copy of a user's object, so its state depends on the number of workers.
    items = [("dataset", one) for one in (consumer.samples, *parts_of(consumer.samples))]
    items += [("sampler", one) for one in layers(consumer.plan.source) if not isinstance(one, PlanSampler)]
    for role, item in [*items, ("collate function", config.collate_fn)]:
        if has_state(item):
            raise ConfigError(
                f"{auto} is not possible: the {role} {type(item).__name__} has a state "
                "(state_dict and load_state_dict), which depends on the number of workers. Pass a number: "
                "num_workers=4, or 0 to make batches in this process"
            )
    if not config.pure and consumer.seed is None:
        raise ConfigError(
            f"{auto} needs seed=, or a dataset that declares itself pure: otherwise the draws of {name} from Python's, "
            "NumPy's or torch's global generators depend on the number of workers, as in torch"
        )
    if config.exact_depth:
        raise ConfigError(
            f"{auto} needs a sampler that draws its order at the start, or from a seed: this one draws step by step "
            "from a shared generator, so the prefetch depth would be visible. Pass seed= or a number of workers"
        )
    processes = config.threads_per_worker > 1 or config.on_worker_death != "raise"
    processes = processes or config.multiprocessing_context is not None
    # ``worker_init_fn`` may expect a worker.
    limited = config.timeout or config.max_bytes_in_flight is not None or config.worker_init_fn is not None
    return Autotuner(
        AUTO if config.single_process else config.kind,
        inline=config.executor == AUTO and not (processes or limited),
        cores=cores(),
        ranks=local_ranks(),
        starts=config.forks_workers and not config.persistent_workers,
    )
