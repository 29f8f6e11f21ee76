"""`Autotuner`: chooses the number of workers for ``num_workers="auto"`` with a doubling search in the run itself.

    1 worker  -->  2  -->  4 ...  -->  chosen: the fewest within 5 % of the fastest, or inline, estimated from 1 worker
       waits?             1.1x?

The executor follows from the settings and the dataset's declarations; only the number of its workers is searched. It
doubles while the run waits for more than 5 % of its time, two doublings make it at least 10 % faster, and this rank's
share of cores and memory is not used up. Each number makes the next batches of the run, so none is made twice.

This module starts no processes. `penstock.DataLoader` gives it the batches, and its workers the number it asks for.
"""

from __future__ import annotations

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

# Speed-up that two doublings must achieve: one bad measurement, while the machine was busy, must not end the search.
_GAIN = 1.1
_AS_GOOD = 0.95
# The work of a batch may take this much longer inline than in a worker, because that was not measured.
_UNSURE = 1.1
# Workers of all ranks of a machine with fewer cores, for datasets that use the CPU for less than this share of their
# time: they wait for storage.
_MOST, _COMPUTES = 64, 0.5
# Seconds to measure a number of workers. They deliver in bursts, so rounds of one batch of each count: at least two.
_SECONDS = 0.8
# A training step is a pause if it takes this many seconds and this many times the average.
_PAUSE, _LONGER = 0.5, 20


@dataclass
class Throughput:
    """A number of workers, and how fast they made the next batches of the run.

    Attributes:
        workers: the number; 0 is inline, which is estimated.
        batches: number of measured batches.
        wait: seconds in the loader.
        train: seconds between a batch and the next request.
        metrics: metrics of these batches, of all workers together.
        error: why the number does not work.
    """

    workers: int
    batches: int = 0
    wait: float = 0.0
    train: float = 0.0
    metrics: BatchMetrics = field(default_factory=BatchMetrics)
    error: str = ""

    def rate(self, start: float = 0.0) -> float:
        """Return samples/s, if each batch also costs ``start`` seconds of starting workers."""
        seconds = self.wait + self.train + self.batches * start
        return self.metrics.samples / seconds if seconds > 0 else 0.0

    @property
    def waiting(self) -> float:
        """Share of time that the consumer waited."""
        seconds = self.wait + self.train
        return self.wait / seconds if seconds > 0 else 1.0


class Autotuner:
    """Tries numbers of workers until one is chosen.

    Args:
        executor: the executor, for reports.
        inline: whether inline may be chosen. Its speed is estimated from one worker, because files that it opens would
            be shared by workers that are forked later.
        cores: cores of this machine.
        ranks: ranks of the job on this machine, which tune at the same time; each uses its share of cores and memory.
        persistent: whether the workers stay between epochs, so that their start is no cost of an epoch.

    Attributes:
        workers: the number to use now; 0 is inline.
        chosen: the number chosen; None before.
        why: reason of the choice, in words.
        memory_for: number of workers that fit into memory; None if unknown.
        length: number of batches per epoch; None if unknown.
        start: seconds from the start of the last iterator to its first batch.
    """

    def __init__(self, executor: str, *, inline: bool, cores: int, ranks: int = 1, persistent: bool = False) -> None:
        self.workers = 1
        self.chosen: int | None = None
        self.why = ""
        self.memory_for: int | None = None
        self.length: int | None = None
        self.start = 0.0
        self._executor = executor
        self._inline = inline
        self._cores = max(1, cores // ranks)
        self._most = max(_MOST // ranks, self._cores)
        self._ranks = ranks
        self._persistent = persistent
        self._window: weakref.ref[Window] | None = None
        self._now = Throughput(1)
        self._skip = 1  # batches that do not count: now the first step of the training, which may compile a model
        self._last = 0.0  # time of the last delivery
        self._first = True  # whether the iterator has delivered nothing yet
        self._tried: list[Throughput] = []

    def begin(self, window: Window, now: float, length: int | None) -> None:
        """Measure an epoch iterator, which began at a time. Older ones are not measured any more."""
        self.length, self._window = length, weakref.ref(window)
        self._last, self._first = now, True

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
        if self._first:
            # The start of the workers is no step of the training.
            self.start, self._first = had - self._last, False
        elif self._skip:
            self._skip -= 1
        elif now.batches and train > max(_PAUSE, _LONGER * now.train / now.batches):
            # A pause of the program (a validation, a checkpoint); what is ready then says nothing.
            self._skip = depth + now.workers - 1
        else:
            now.batches += 1
            now.wait += had - asked
            now.train += train
            now.metrics.add(metrics)
        self._last = had
        rounds, rest = divmod(now.batches, now.workers)
        return rounds >= 2 and not rest and now.wait + now.train >= _SECONDS

    def note(self, found: Throughput) -> None:
        """Record the result of the current number of workers, or why it does not work, and set the next one."""
        self._tried.append(found)
        *before, last, this = [0.0, 0.0, *map(self._rate, self._tried)]
        # Twice as many workers, or this rank's limit.
        count = min(2 * self.workers, self.limit)
        if found.waiting < ENOUGH:
            self._choose("more workers would gain almost nothing")
        elif found.error or max(last, this) < _GAIN * max(before):
            self._choose("more workers are not faster")
        elif count >= _GAIN * self.workers:
            self.workers = count
            self._now = Throughput(count)
        elif last and this < _GAIN * last and self._tried[-2].workers != self.workers:
            # No other number follows, so this one is measured twice.
            self._now = Throughput(self.workers)
        else:
            self._choose("this rank may have no more workers")

    def fail(self, error: Exception) -> None:
        """Record that the current number of workers does not work, and choose one that does."""
        self.note(Throughput(self.workers, error=f"{type(error).__name__}: {error}"))

    @property
    def limit(self) -> int:
        """Maximum number of workers of this rank."""
        work = self._tried[0].metrics
        limit = self._cores if work.cpu >= _COMPUTES * work.fetch else self._most
        limit = limit if self.memory_for is None else min(limit, self.memory_for)
        return limit if self.length is None else min(limit, max(2, self.length))

    def _choose(self, reason: str) -> None:
        good, one = [one for one in self._tried if not one.error], self._tried[0]
        if self._inline and one.waiting >= ENOUGH:
            work = _UNSURE * (one.metrics.fetch + one.metrics.collate)
            good.insert(0, Throughput(0, one.batches, work, one.train, one.metrics))
            self._tried.append(good[0])
        best = max(map(self._rate, good))
        chosen = next(one for one in good if self._rate(one) >= _AS_GOOD * best)
        self.workers = self.chosen = chosen.workers
        waits = f"waiting {chosen.waiting:.0%}" if chosen.workers else "estimated from one worker"
        if not chosen.workers:
            reason = "no number of workers is faster"
        elif chosen is not good[-1]:
            reason = "more workers are not faster"
        self.why = f"{rate_text(chosen.rate())} samples/s, {waits}; {reason}"

    def _rate(self, one: Throughput) -> float:
        """Return samples/s over whole epochs, each of which starts workers unless they stay."""
        return one.rate(self.start / self.length if self.length and one.workers and not self._persistent else 0.0)

    def stats(self) -> dict[str, Any]:
        """Return the results so far as plain numbers and text."""
        tried = [
            {
                **self._named(one.workers),
                "batches": one.batches,
                "samples_per_second": one.rate(),
                "wait_share": one.waiting,
                "estimated": not one.workers,
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
        persistent=config.persistent_workers,
    )
