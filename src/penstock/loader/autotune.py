"""`Autotuner`: chooses executor and number of workers for ``num_workers="auto"`` with a doubling search.

    inline --> 1 process --> 2 processes --> 2 threads --> 4 ... --> chosen         a minute later, once:
     waits?     waits?        1.1x?           or better?    no more                 chosen --> twice as many, if faster

Search: inline first, then one worker, then two workers of each permitted executor. Then the number of workers of the
best executor is doubled while the run gets at least 10 % faster and this rank's share of cores and memory is not used
up. The smallest setting within 5 % of the best one is chosen.

The search ends at once with a setting under which the run waits for less than 5 % of its time. This module starts no
processes.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.cores import cores
from penstock.distributed import local_ranks
from penstock.errors import ConfigError
from penstock.loader.config import AUTO, PROCESSES, LoaderConfig
from penstock.loader.generators import preserved_generators
from penstock.loader.messages import BatchMetrics
from penstock.loader.setting import EXECUTOR_COST, INLINE, Setting
from penstock.loader.throughput import ENOUGH, Throughput, ThroughputMeter
from penstock.plan.user_states import has_state
from penstock.samplers.base import PlanSampler
from penstock.samplers.identity import parts_of
from penstock.samplers.shares import layers
from penstock.wording import rate_text

if TYPE_CHECKING:
    from penstock.loader.pipeline import Pipeline

__all__ = ["Autotuner", "TriedSetting", "autotuner_of"]

# Speed-up that twice as many workers must achieve.
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
# Measurement time of a setting, in seconds.
_SECONDS = 0.8
# Seconds from the choice to the second search.
_LATER = 60.0


class TriedSetting(NamedTuple):
    """A setting and its throughput.

    Attributes:
        error: why the setting does not work; "" if it does.
        estimated: whether the throughput is an estimate.
    """

    setting: Setting
    found: Throughput
    error: str = ""
    estimated: bool = False

    @property
    def keeps_up(self) -> bool:
        """Whether more workers would gain almost nothing."""
        return not self.error and self.found.batches > 0 and self.found.waiting < ENOUGH


class Autotuner:
    """Tries settings until one is chosen, and searches once more later, starting from the chosen one.

    Args:
        executors: permitted executors with workers, starting with the one that slows the training least.
        inline: "try" inline first; "estimate" it from one worker (a dataset that is not ``pure`` may hold an open file,
            which a later fork would share with this process); or "never".
        cores: cores of this machine.
        ranks: ranks of the job on this machine, which tune at the same time; each uses its share of cores and memory.
        persistent: whether workers are persistent, so that the time to start them does not matter.
        seconds: minimum measurement time of a setting.
        overhead: seconds per inline batch in addition to the work, for the estimate.
        later: seconds from the choice to the second search.

    Attributes:
        current: the setting to use now.
        chosen: the setting chosen last; None before the first choice.
        decided: whether no search is running.
        settled: whether the loader's attributes show the choice.
        why: reason of the choice, in words.
        length: number of batches per epoch; None if unknown.
        memory_for: number of workers that fit into memory; None if unknown.
    """

    def __init__(
        self,
        executors: Sequence[str],
        *,
        inline: str,
        cores: int,
        persistent: bool,
        ranks: int = 1,
        seconds: float = _SECONDS,
        overhead: float = 0.0,
        later: float = _LATER,
    ) -> None:
        self.chosen: Setting | None = None
        self.decided = self.settled = False
        self.why = ""
        self.length: int | None = None
        self.memory_for: int | None = None
        self.ranks = ranks
        self._executors = list(executors)
        self._inline = inline
        self._cores = max(1, cores // ranks)
        self._most = max(_MOST // ranks, self._cores)
        self._persistent = persistent
        self._seconds = seconds
        self._overhead = overhead
        self._later = later
        # Results of the previous search.
        self._earlier: list[TriedSetting] = []
        self._tried: list[TriedSetting] = []
        self._searches = self._copies = self._init_calls = 0
        self._chosen_at = 0.0
        self._meter: ThroughputMeter | None = None
        self._begin(INLINE if inline == "try" else Setting(self._executors[0], 1))

    # The search.

    def _begin(self, start: Setting) -> None:
        self._earlier, self._tried = self._tried, []
        self._searches += 1
        self.decided = self.settled = False
        self._steps = self._search(start)
        self.current = next(self._steps)

    def _search(self, setting: Setting) -> Generator[Setting, TriedSetting, None]:
        """Yield the settings to try, starting with one, and receive the result of each."""
        found = yield setting
        if found.keeps_up:
            return
        if setting == INLINE:
            setting = Setting(self._executors[0], 1)
            found = yield setting
            if found.keeps_up:
                return
        if setting.workers == 1 and self._inline == "estimate":
            self._tried.append(self._estimate(found))
        executors = self._executors if setting.workers == 1 else [setting.executor]
        while (count := self._next_count(found.setting.workers)) is not None:
            before, best = found, None
            for executor in executors:
                found = yield Setting(executor, count)
                if found.keeps_up:
                    return
                best = found if best is None or self._rate(found) > self._rate(best) else best
            assert best is not None
            if self._rate(best) == 0 or self._rate(best) < _GAIN * self._rate(before):
                return
            executors, found = [best.setting.executor], best

    def _next_count(self, count: int) -> int | None:
        """Return the next number of workers to try: twice as many, or this rank's limit; None at the limit."""
        limit = self.limit
        if 2 * count <= limit:
            return 2 * count
        return limit if limit >= _GAIN * count else None

    @property
    def limit(self) -> int:
        """Maximum number of workers of this rank."""
        limit = self._cores if self._computes() else self._most
        limit = limit if self.memory_for is None else min(limit, self.memory_for)
        return limit if self.length is None else min(limit, max(2, self.length))

    def _computes(self) -> bool:
        """Return whether the dataset is known to use the CPU, measured with at most one worker."""
        works = [one.found for one in (*self._earlier, *self._tried) if one.setting.workers <= 1 and not one.estimated]
        fetch, cpu = (sum(getattr(found.metrics, name) for found in works) for name in ("fetch", "cpu"))
        telling = fetch >= _TELLING_SECONDS or sum(found.batches for found in works) >= _TELLING
        return telling and cpu >= _COMPUTES * fetch

    def _estimate(self, one: TriedSetting) -> TriedSetting:
        """Return the estimated throughput of inline batches, from the work of one worker."""
        found = one.found
        wait = found.metrics.fetch + found.metrics.collate + self._overhead * found.batches
        metrics = BatchMetrics(samples=found.samples)
        return TriedSetting(INLINE, Throughput(found.batches, wait, found.train, metrics), one.error, estimated=True)

    def note(self, found: Throughput, error: str = "") -> None:
        """Record the result of the current setting, or why it does not work, and switch to the next one."""
        assert not self.decided
        result = TriedSetting(self.current, found, error)
        self._tried.append(result)
        self._meter = None
        try:
            self.current = self._steps.send(result)
        except StopIteration:
            self._choose()

    def _choose(self) -> None:
        good = [one for one in self._tried if not one.error and one.found.samples]
        self.decided, self._chosen_at = True, perf_counter()
        if not good:
            first = self._tried[0].setting
            self.current = self.chosen = INLINE if self._inline == "estimate" else first
            self.why = "no workers could be started"
            return
        best = max(map(self._rate, good))
        as_good = [one for one in good if self._rate(one) >= _AS_GOOD * best]
        chosen = min(as_good, key=lambda one: (one.setting.workers, EXECUTOR_COST[one.setting.executor]))
        self.current = self.chosen = chosen.setting
        waits = "estimated from one worker" if chosen.estimated else f"waiting {chosen.found.waiting:.0%}"
        self.why = f"{rate_text(chosen.found.rate)} samples/s, {waits}; {self._reason(chosen)}"

    def _reason(self, chosen: TriedSetting) -> str:
        if chosen.keeps_up:
            return "more workers would gain almost nothing"
        if chosen.setting == INLINE:
            return "no number of workers is faster"
        if chosen.setting.workers >= self.limit:
            return "this rank may have no more workers"
        return "more workers are not faster"

    def _rate(self, one: TriedSetting) -> float:
        """Return samples/s, including the time to start workers in every epoch."""
        found = one.found
        if one.error or not found.samples:
            return 0.0
        seconds = found.seconds / found.samples
        if self.length and found.starts and not self._persistent:
            seconds += found.start / found.starts / (self.length * found.samples / found.batches)
        return (_UNSURE if one.estimated else 1.0) / seconds if seconds > 0 else math.inf

    # The second search.

    @property
    def finished(self) -> bool:
        """Whether the choice is final: the second search has ended, or is impossible."""
        # Inline batches may have opened files that a fork would share.
        return self.decided and (self._searches > 1 or (self._inline == "estimate" and self.chosen == INLINE))

    def search_again(self, now: float) -> bool:
        """Start the second search from the chosen setting if it is due. Return whether it started."""
        if not self.decided or self.finished or now < self._chosen_at + self._later:
            return False
        self._begin(self.current)
        return True

    # Interface for the loader.

    def meter(self, depth: int) -> ThroughputMeter:
        """Return the meter of the current setting, over all of its iterators."""
        if self._meter is None:
            self._meter = ThroughputMeter(self.current.workers, seconds=self._seconds, depth=depth)
        return self._meter

    def started(self, config: LoaderConfig) -> None:
        """Count new workers of a setting: copies of the dataset in processes, and calls of ``worker_init_fn``."""
        self._copies += config.workers if config.forks_workers else 0
        self._init_calls += config.workers if config.worker_init_fn is not None else 0

    def stats(self) -> dict[str, Any]:
        """Return the results so far as plain numbers and text."""
        tried = [
            {
                "executor": one.setting.executor,
                "workers": one.setting.workers,
                "batches": one.found.batches,
                "samples_per_second": one.found.rate,
                "wait_share": one.found.waiting,
                "estimated": one.estimated,
                "error": one.error,
            }
            for one in (*self._earlier, *self._tried)
        ]
        chosen = self.chosen
        return {
            "chosen": None if chosen is None else {"executor": chosen.executor, "workers": chosen.workers},
            "why": self.why,
            "tried": tried,
            "searches": self._searches,
            "dataset_copies": self._copies,
            "worker_init_fn_calls": self._init_calls,
            "local_ranks": self.ranks,
        }


def autotuner_of(pipeline: Pipeline, config: LoaderConfig) -> Autotuner:
    """Return an autotuner for a pipeline.

    Raises:
        ConfigError: the batches would depend on the workers, or there are no workers to choose.
    """
    _check(pipeline, config)
    processes = config.threads_per_worker > 1 or config.on_worker_death != "raise"
    processes = processes or config.multiprocessing_context is not None
    kinds, inline = [config.executor], "never"
    if config.executor == AUTO:
        kinds = ["process"] if PROCESSES else ["thread"]
        if PROCESSES and not processes:
            kinds = [AUTO, *kinds] if config.releases_gil else kinds
            # The function may expect a worker process.
            here = config.worker_init_fn is None
            kinds = [*kinds, "thread"] if config.pure and here else kinds
            if here and not config.timeout and config.max_bytes_in_flight is None:
                inline = "try" if config.pure else "estimate"
    return Autotuner(
        kinds,
        inline=inline,
        cores=cores(),
        ranks=local_ranks(),
        persistent=config.persistent_workers,
        overhead=_put_back() if inline == "estimate" else 0.0,
    )


def _put_back() -> float:
    """Return the seconds to restore the global generators after an inline batch."""
    took = []
    for _ in range(3):
        start = perf_counter()
        with preserved_generators():
            pass
        took.append(perf_counter() - start)
    return min(took)


def _check(pipeline: Pipeline, config: LoaderConfig) -> None:
    position, name = pipeline.position, type(pipeline.dataset).__name__
    auto = "num_workers='auto'"
    if config.executor == "ray":
        raise ConfigError(f"{auto} tries executors of this machine: for executor='ray' pass a number")
    if position.plan is None:
        raise ConfigError(
            f"{auto} is not possible for {name}: the samples of an iterable dataset depend on the number of workers, "
            "so pass a number, or make the dataset map-style"
        )
    _refuse_states(pipeline, config)
    if not config.pure and not position.seeded:
        raise ConfigError(
            f"{auto} needs seed=, or a dataset that declares itself pure: otherwise the draws of {name} from Python's, "
            "NumPy's or torch's global generators depend on the number of workers, as in torch"
        )
    if config.exact_depth:
        raise ConfigError(
            f"{auto} needs a sampler that draws its order at the start, or from a seed: this one draws step by step "
            "from a shared generator, so the prefetch depth would be visible. Pass seed= or a number of workers"
        )


def _refuse_states(pipeline: Pipeline, config: LoaderConfig) -> None:
    """Raise if a user's object has a state: each worker has a separate copy, so the number of workers would matter."""
    assert pipeline.position.plan is not None
    items = [("dataset", one) for one in (pipeline.samples, *parts_of(pipeline.samples))]
    items += [("sampler", one) for one in layers(pipeline.position.plan.source) if not isinstance(one, PlanSampler)]
    for role, item in [*items, ("collate function", config.collate_fn)]:
        if has_state(item):
            raise ConfigError(
                f"num_workers='auto' is not possible: the {role} {type(item).__name__} has a state "
                "(state_dict and load_state_dict), which depends on the number of workers. Pass a number: "
                "num_workers=4, or 0 to make batches in this process"
            )
