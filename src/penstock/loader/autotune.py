"""`Autotuner`: finds executor and number of workers for ``num_workers="auto"``, by a plain doubling search.

    inline --> 1 process --> 2 processes --> 2 threads --> 4 ... --> chosen         a minute later, once:
     waits?     waits?        1.1x?           or better?    no more                 chosen --> twice as many, if it pays

Search: batches are made inline, by one worker, by two of each executor that may be used, and by twice as many of the
best one as long as that makes the run a tenth faster and this rank's share of cores and memory lasts. Of all settings
within 5 % of the best one, the smallest is chosen.

A setting under which the run waits for less than 5 % of its time ends the search. No processes here.
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
from penstock.loader.fetch import preserved_generators
from penstock.loader.messages import BatchMetrics
from penstock.loader.setting import INLINE, LEAVES, Setting
from penstock.loader.throughput import ENOUGH, Throughput, ThroughputMeter
from penstock.plan.user_states import has_state
from penstock.samplers.base import PlanSampler
from penstock.samplers.identity import parts_of
from penstock.samplers.shares import layers
from penstock.wording import rate_text

if TYPE_CHECKING:
    from penstock.loader.pipeline import Pipeline

__all__ = ["Autotuner", "Tried", "autotuner_of"]

_GAIN = 1.1  # that twice as many workers have to bring
_AS_GOOD = 0.95
_UNSURE = 0.9  # of the rate that is worked out for inline, which nobody has measured, counts
_MOST = 64  # workers of all ranks of a machine, if it has not more cores: for datasets that wait for storage
_TELLING = 64  # batches by which it is known whether a dataset computes or waits: one in 16 is measured
_COMPUTES = 0.5  # share of its time in which a dataset that computes uses the processor
_SECONDS = 0.8  # that a setting is measured for
_LATER = 60.0  # seconds from the choice to the second search


class Tried(NamedTuple):
    """What a setting gave.

    Attributes:
        error: why the setting cannot be had; "" if it can.
        estimated: whether nobody has measured it.
    """

    setting: Setting
    found: Throughput
    error: str = ""
    estimated: bool = False

    @property
    def keeps_up(self) -> bool:
        """Whether more workers would gain next to nothing."""
        return not self.error and self.found.batches > 0 and self.found.waiting < ENOUGH


class Autotuner:
    """Tries settings until one is chosen, and once more later, from the chosen one on.

    Args:
        executors: with workers, that may be tried; the one that leaves most to the training first.
        inline: "try" it first, "estimate" it by the work of one worker (a dataset that does not say it is ``pure`` may
            keep an open file, which a later fork would share with this process), or "never".
        cores: of this machine.
        ranks: of the job on this machine, which tune at the same time: each takes its share of cores and memory.
        persistent: whether workers outlive a pass, so that starting them costs nothing in the long run.
        seconds: that a setting is measured for, at least.
        overhead: seconds that an inline batch takes besides the work on it, for the estimate.
        later: seconds from the choice to the second search.

    Attributes:
        current: the setting to use now.
        chosen: the setting that was chosen last; None before.
        decided: whether no search is under way.
        settled: whether the loader's attributes say what was chosen.
        why: the reason of the choice, in words.
        length: batches of a pass; None where nobody knows.
        memory_for: workers that there is memory for; None where nobody knows.
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
        self._earlier: list[Tried] = []  # of the search before this one
        self._tried: list[Tried] = []
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

    def _search(self, setting: Setting) -> Generator[Setting, Tried, None]:
        """Yield the settings to try, from this one on, and take what each of them gave."""
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
        """Return the number of workers to try after this one: twice as many, or all that this rank may have."""
        limit = self.limit
        if 2 * count <= limit:
            return 2 * count
        return limit if limit >= _GAIN * count else None

    @property
    def limit(self) -> int:
        """Workers that this rank may have."""
        limit = self._cores if self._computes() else self._most
        limit = limit if self.memory_for is None else min(limit, self.memory_for)
        return limit if self.length is None else min(limit, max(2, self.length))

    def _computes(self) -> bool:
        """Return whether the dataset is known to use the processor, by what few workers told: many share the cores."""
        works = [one.found for one in (*self._earlier, *self._tried) if one.setting.workers <= 1 and not one.estimated]
        fetch, cpu = (sum(getattr(found.metrics, name) for found in works) for name in ("fetch", "cpu"))
        return sum(found.batches for found in works) >= _TELLING and cpu >= _COMPUTES * fetch

    def _estimate(self, one: Tried) -> Tried:
        """Return what making batches inline would give, by the work of one worker."""
        found = one.found
        wait = found.metrics.fetch + found.metrics.collate + self._overhead * found.batches
        metrics = BatchMetrics(samples=found.samples)
        return Tried(INLINE, Throughput(found.batches, wait, found.train, metrics), one.error, estimated=True)

    def note(self, found: Throughput, error: str = "") -> None:
        """Take what the current setting gave, or why it cannot be had, and go on to the next one."""
        assert not self.decided
        result = Tried(self.current, found, error)
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
            self.why = "no workers can be had"
            return
        best = max(map(self._rate, good))
        as_good = [one for one in good if self._rate(one) >= _AS_GOOD * best]
        chosen = min(as_good, key=lambda one: (one.setting.workers, LEAVES[one.setting.executor]))
        self.current = self.chosen = chosen.setting
        waits = "by what a worker told" if chosen.estimated else f"waiting {chosen.found.waiting:.0%}"
        self.why = f"{rate_text(chosen.found.rate)} samples/s, {waits}; {self._reason(chosen)}"

    def _reason(self, chosen: Tried) -> str:
        if chosen.keeps_up:
            return "more workers would gain next to nothing"
        if chosen.setting == INLINE:
            return "no number of workers is faster"
        if chosen.setting.workers >= self.limit:
            return "this rank may have no more workers"
        return "more workers are not faster"

    def _rate(self, one: Tried) -> float:
        """Samples/s, with what starting workers takes from every pass."""
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
        """Whether the choice stays: there was a second search, or none may be."""
        # Making batches inline may have opened files that a fork would share.
        return self.decided and (self._searches > 1 or (self._inline == "estimate" and self.chosen == INLINE))

    def look_again(self, now: float) -> bool:
        """Search once more, from the chosen setting on, if it is time for that; return whether it is."""
        if not self.decided or self.finished or now < self._chosen_at + self._later:
            return False
        self._begin(self.current)
        return True

    # What the passes need, and what is said.

    def meter(self, depth: int) -> ThroughputMeter:
        """Return what measures the current setting, in this pass and those before."""
        if self._meter is None:
            self._meter = ThroughputMeter(self.current.workers, seconds=self._seconds, depth=depth)
        return self._meter

    def started(self, config: LoaderConfig) -> None:
        """Count new workers of a setting: each process has a copy of the dataset, and each worker is initialised."""
        self._copies += config.workers if config.forks_workers else 0
        self._init_calls += config.workers if config.worker_init_fn is not None else 0

    def stats(self) -> dict[str, Any]:
        """Return what was found so far, as plain numbers and text."""
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
    """Return the search for a pipeline.

    Raises:
        ConfigError: its batches would depend on what makes them, or it has no workers to choose.
    """
    _check(pipeline, config)
    processes = config.threads_per_worker > 1 or config.on_worker_death != "raise" or config.dispatch != AUTO
    processes = processes or config.multiprocessing_context is not None
    kinds, inline = [config.executor], "never"
    if config.executor == AUTO:
        kinds = ["process"] if PROCESSES else ["thread"]
        if PROCESSES and not processes:
            kinds = [AUTO, *kinds] if config.releases_gil else kinds
            here = config.worker_init_fn is None  # it may be meant for a process of its own
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
    """Return the seconds that it takes to put the global generators back after a batch that was made inline."""
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
        raise ConfigError(
            f"{auto} tries what this machine has: for executor='ray' give RayOptions(min_workers=, max_workers=)"
        )
    if position.plan is None:
        raise ConfigError(
            f"{auto} cannot be had for {name}: what comes from an iterable dataset depends on the number of workers, "
            "so give it, or make the dataset map-style"
        )
    _refuse_states(pipeline, config)
    if not config.pure and not position.seeded:
        raise ConfigError(
            f"{auto} needs seed=, or a dataset that declares itself pure: else what {name} draws from Python's, "
            "NumPy's or torch's global generators depends on the number of workers, as in torch"
        )
    if position.plan.draws_late:
        raise ConfigError(
            f"{auto} needs a sampler that draws its order at the beginning, or from a seed: this one draws as it goes, "
            "from a generator that others see, so how far workers are ahead shows. Give seed= or a number of workers"
        )


def _refuse_states(pipeline: Pipeline, config: LoaderConfig) -> None:
    """Raise if an object of the user's has a state: each worker would have its own, and a new number new ones."""
    assert pipeline.position.plan is not None
    items = [("dataset", one) for one in (pipeline.samples, *parts_of(pipeline.samples))]
    items += [("sampler", one) for one in layers(pipeline.position.plan.source) if not isinstance(one, PlanSampler)]
    for role, item in [*items, ("collate function", config.collate_fn)]:
        if has_state(item):
            raise ConfigError(
                f"num_workers='auto' cannot be had: the {role} {type(item).__name__} has a state of its own "
                "(state_dict and load_state_dict), which depends on the number of workers. Give a number: "
                "num_workers=4, or 0 to make batches in this process"
            )
