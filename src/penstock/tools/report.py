"""`loader.report()`: statistics as a table, with one sentence: what limits the run, and what to change.

The verdict depends on the share of time that the consumer waited, without the first batch of each epoch. Below 5 % the
training is the limit. Otherwise, if workers were busy, there are too few of them. If workers were idle, something else
delays batches: batches that the program holds, memory limits, the hand-over, or slow samples.
"""

from __future__ import annotations

import math
from typing import IO, Any, NamedTuple

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from penstock.loader.autotune import ENOUGH
from penstock.tools.setting import Setting
from penstock.wording import counted

__all__ = ["Verdict", "diagnose", "print_report", "render", "summarize"]

# A verdict needs at least this many batches and seconds.
_BATCHES, _SECONDS = 20, 1.0
# Share of time above which workers count as busy. Batches differ, so 100 % is never reached.
_BUSY = 0.7
# Share of time above which the cores have no time for another worker.
_FULL = 0.9
# Suggest num_workers=0 only if the run would take less than this share of its time without workers.
_CLEARLY = 0.8
# A worker gets at least this share of a core where cores are scarce.
_STARVED = 0.1
# Share of batches on a slower transport above which the report names it.
_MANY = 0.1
# Suggest this many times the workers that would just keep up.
_SPARE = 1.1
# Never suggest more workers.
_MOST = 64
_LIMITS = {"start": "first batches"}


class Verdict(NamedTuple):
    """The limit of a run.

    Attributes:
        limit: "training", "data", "memory", "start" (of epochs), or "unknown" while there is too little data.
        sentence: the limit in words, and what to change.
        stage: the slowest stage, if making batches is the limit; otherwise "".
    """

    limit: str
    sentence: str
    stage: str = ""


class _RunFigures:
    """Figures for the verdict, computed from ``stats()``."""

    def __init__(self, stats: dict[str, Any]) -> None:
        self.stats = stats
        self.executor: str = stats["executor"]
        self.cores: int = stats["cores"]
        self.batches: int = stats["batches"]
        self.threads: int = max(1, stats["threads_per_worker"])
        # Threads that work at the same time.
        self.workers: int = max(1, stats["workers"]) * self.threads
        self.first: float = stats["first_batch_seconds"]
        self.waited = max(0.0, stats["wait_seconds"] - self.first)
        self.seconds = stats["seconds"] - self.first
        self.train: float = stats["train_seconds"]
        self.hand_over: float = stats["stages"].get("hand-over", 0.0)
        self.work: float = sum(stats["stages"].values()) - self.hand_over
        self.cpu: float = stats["cpu_seconds"]
        # Cores that the dataset used.
        self.used = self.cpu / self.seconds if self.seconds > 0 else 0.0
        # Whether workers run on this machine.
        self.here: bool = self.executor != "ray"
        self.full: bool = self.here and (self.used > 0.8 * self.cores or (stats["cores_busy"] or 0.0) > _FULL)
        fetch = self.work - stats["stages"].get("collate", 0.0)
        computing = min(1.0, self.cpu / fetch) if self.cpu > 0 and fetch > 0 else 1.0
        # The rest is waiting: for storage or a lock, or for a core if cores are scarce.
        self.computing: float = 1.0 if self.full and computing > _STARVED else computing

    @property
    def started(self) -> int:
        """Number of workers that run on the Ray cluster."""
        return sum(node["workers"] for node in self.stats.get("nodes", {}).values())

    @property
    def share(self) -> float:
        """Share of the time that the run waited for data."""
        return self.waited / self.seconds if self.seconds > 0 else 0.0

    @property
    def busy(self) -> float:
        """Share of the time that the workers were busy."""
        return min(1.0, self.work / (self.workers * self.stats["seconds"])) if self.stats["seconds"] else 0.0

    @property
    def waiting(self) -> str:
        return f"it waited for data {self.share:.{0 if self.share >= ENOUGH else 1}%} of the time"

    @property
    def alone(self) -> float:
        """Seconds that the run would take without workers."""
        return max(self.train + self.work, 1e-9)

    @property
    def where(self) -> str:
        """The cores, in words."""
        return counted(self.cores, "core") + (" without time to spare" if self.full else "")

    @property
    def needed(self) -> int:
        """Number of workers that would keep up with the training at their current speed."""
        workers = _SPARE * self.work / max(self.train, 1e-9) / self.threads
        return max(1, min(_MOST, math.ceil(workers)))

    def affordable(self, workers: int) -> int:
        """Return the number of workers, limited by the cores. Workers that mostly wait for storage need no core."""
        if not self.here:
            return workers
        if self.computing < 0.5:
            return min(workers, 4 * max(1, self.workers))
        if self.full:
            return max(1, min(workers, self.workers // self.threads))
        return max(1, min(workers, self.cores // self.threads))

    def gain(self, workers: int) -> str:
        """Return the possible speed-up of the run with a number of workers, in words."""
        pace = max(self.train, self.work / (workers * self.threads), 1e-9)
        return f"up to {max(1.0, self.seconds / pace):.1f}x"

    @property
    def longest(self) -> str:
        """The slowest stage, without the hand-over."""
        stages: dict[str, float] = {**self.stats["stages"], "hand-over": 0.0}
        return max(stages, key=lambda name: stages[name])

    @property
    def costliest(self) -> str:
        """The slowest stage and its share of the work, in words."""
        return f"{self.longest!r} ({_percent(self.stats['stages'][self.longest], self.work)} of the work)"


def diagnose(stats: dict[str, Any]) -> Verdict:
    """Return what limits a run with these statistics, from `Statistics.stats`."""
    run = _RunFigures(stats)
    if run.batches < _BATCHES or stats["seconds"] < _SECONDS:
        measured = f"{counted(run.batches, 'batch')} in {_time(stats['seconds'])}"
        return Verdict(
            "unknown",
            f"Too early to say what limits this run: {measured}; ask again after {_BATCHES} batches and one second.",
        )
    if stats["passes"] > 1 and run.first > max(run.waited, ENOUGH * stats["seconds"]):
        return Verdict("start", _start(run))
    tuning = stats.get("tuning")
    if tuning is not None and tuning["chosen"] is None:
        return Verdict("unknown", "Too early to say what limits this run: its workers are still being chosen.")
    if run.share < ENOUGH:
        return Verdict("training", _training(run))
    if tuning is not None:
        return Verdict("data", _tuned(run), run.longest if run.busy >= _BUSY else "")
    if stats["workers"] == 0:
        return Verdict("data", _inline(run), run.longest)
    if not run.here and run.started < stats["workers"]:
        return Verdict("data", f"Data limits this run: {run.waiting}, and {_pending(run)}.")
    if run.busy < _BUSY and (why := _memory(run)):
        return Verdict("memory", f"Memory limits this run: {run.waiting}, and {why}.")
    if run.busy < _BUSY and run.here and run.alone < _CLEARLY * run.seconds:
        return Verdict("data", _needless(run), "hand-over")
    busy = run.busy >= _BUSY
    why = _too_few(run) if busy else _idle(run)
    return Verdict("data", f"Data limits this run: {run.waiting}, and {why}.", run.longest if busy else "")


def summarize(stats: dict[str, Any]) -> str:
    """Return one short line: samples/s, the share of time spent waiting, and the limit of the run once it is known.

    >>> summarize(DataLoader(range(10)).stats())
    '0.00 samples/s · waiting 0%'
    """
    verdict = diagnose(stats)
    parts = [f"{_digits(stats['samples_per_second'])} samples/s", f"waiting {_RunFigures(stats).share:.0%}"]
    if verdict.limit != "unknown":
        parts.append(f"limited by {verdict.stage or _LIMITS.get(verdict.limit, verdict.limit)}")
    return " · ".join(parts)


def _start(run: _RunFigures) -> str:
    stats = run.stats
    text = (
        f"Starting limits this run: the first batches of its {stats['passes']:,} passes took "
        f"{_percent(run.first, stats['seconds'])} of the time, {_time(run.first / stats['passes'])} each"
    )
    if stats["workers"] and not stats["persistent_workers"]:
        return f"{text}; persistent_workers=True keeps the workers alive between passes."
    return f"{text}; longer passes have fewer of them."


def _training(run: _RunFigures) -> str:
    text = f"Training limits this run: {run.waiting}, so a faster loader would gain almost nothing"
    workers = run.stats["workers"]
    if 2 * run.needed <= workers and "tuning" not in run.stats:
        return f"{text}, and num_workers={run.needed} instead of {workers} would be enough."
    return f"{text}; nothing needs to change here."


def _tuned(run: _RunFigures) -> str:
    """Return advice for a run whose executor and workers were chosen by auto-tuning."""
    if run.busy < _BUSY and (why := _memory(run)):
        return f"Memory limits this run: {run.waiting}, and {why}."
    return (
        f"Data limits this run: {run.waiting}, even with the best setting that auto-tuning tried; make "
        f"{run.costliest} cheaper, or give it more cores."
    )


def _inline(run: _RunFigures) -> str:
    workers = run.affordable(run.needed)
    return (
        f"Data limits this run: {run.waiting}, because each batch is made only when the training asks for it; "
        f"num_workers={workers} makes batches in parallel, which can make the run {run.gain(workers)} faster."
    )


def _memory(run: _RunFigures) -> str:
    """Return how memory keeps idle workers from delivering; "" if it does not."""
    queue, refused = run.stats["queue"], run.stats["ways"].get("refused", 0)
    if queue["depth"] < 0.75 * queue["prefetch"]:
        return (
            f"only {queue['depth']:.1f} of the {queue['prefetch']} batches that prefetch_factor allows were "
            "in flight at a time; raise max_bytes_in_flight or the memory limit, or make batches smaller"
        )
    if refused > _MANY * run.batches:
        return (
            f"the system refused shared memory for {_percent(refused, run.batches)} of the batches, which went through "
            "a pipe; raise its limit (ulimit -f, or a container's memory), or make batches smaller"
        )
    return ""


def _pending(run: _RunFigures) -> str:
    return (
        f"only {run.started} of its {counted(run.stats['workers'], 'worker')} could be started on the cluster; add "
        "nodes, or request less with RayOptions(num_cpus=, resources=, label_selector=)"
    )


def _needless(run: _RunFigures) -> str:
    return (
        f"The hand-over limits this run: {run.waiting}, but making all batches took only {_time(run.work)}; "
        f"num_workers=0 makes them without a hand-over, which can make the run up to {run.seconds / run.alone:.1f}x "
        "faster, as can larger batches."
    )


def _too_few(run: _RunFigures) -> str:
    """Return advice for a run whose workers are busy."""
    workers: int = run.stats["workers"]
    processes = max(1, run.stats["processes"])
    many = f"its {workers} worker{'s were' if workers > 1 else ' was'} busy {run.busy:.0%} of it"
    more = run.affordable(max(run.needed, workers + 1))
    if run.workers > processes and run.computing < 0.75 and 0.4 < run.used / processes < 1.25:
        return (
            f"its {run.workers} threads used {run.used:.1f} cores of {run.cores}: if they run Python code, they take "
            "turns (GIL), and executor='process' with threads_per_worker=1 runs them in parallel; if they wait for "
            f"storage, num_workers={more} may help"
        )
    if run.computing < 0.5:
        reason = f"most of that ({1 - run.computing:.0%}) waiting for storage or a lock"
        return f"{many}, {reason}; num_workers={more} can make it {run.gain(more)} faster"
    if more <= workers:
        cheaper = f"make {run.costliest} cheaper, or give it more cores"
        return f"{many}, on {run.where}, so more workers would not help; {cheaper}"
    text = f"{many}; num_workers={more} can make it {run.gain(more)} faster"
    return text if more >= run.needed else f"{text}, and a cheaper {run.costliest} can make it even faster"


def _idle(run: _RunFigures) -> str:
    """Return advice for a run that waits although its workers are idle and memory is not the limit."""
    queue = run.stats["queue"]
    busy = f"its workers were busy only {run.busy:.0%} of it"
    if run.hand_over > 0.4 * run.waited:
        other = "use executor='thread', whose hand-over is free, if the dataset releases the GIL"
        if run.executor == "thread":
            other = "use pin_memory=False, which saves the copy"
        if run.stats["copies"]["batches"]:
            other = "use smaller types (uint8 for images), which are copied to the device in less time"
        return f"{busy}, while the hand-over of batches took {_time(run.hand_over)}; return less data, or {other}"
    factor: int = -(-queue["prefetch"] // run.stats["workers"])
    if queue["occupancy"] > 0.3:
        return (
            f"{busy}, with {queue['ready']:.1f} batches ready on average: sometimes a slow batch delays the others; "
            f"prefetch_factor={2 * factor} would bridge that"
        )
    if run.full:
        return f"{busy}, on {run.where}; make {run.costliest} cheaper, or give it more cores"
    return (
        f"{busy}, with almost no batch ready: the sampler in the main process is slow, or too few batches are in "
        f"flight; try prefetch_factor={2 * factor}"
    )


def render(stats: dict[str, Any]) -> Table:
    """Return the statistics as a table."""
    table = Table(title=_title(stats), title_justify="left", show_header=False, title_style="bold")
    table.add_column()
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_column()
    passes = counted(stats["passes"], "pass")
    table.add_row("batches", f"{stats['batches']:,}", f"{_digits(stats['batches_per_second'])}/s", passes)
    table.add_row("samples", f"{stats['samples']:,}", f"{_digits(stats['samples_per_second'])}/s", "")
    table.add_row("data", decimal(stats["bytes"]), f"{decimal(int(stats['bytes_per_second']))}/s", "", end_section=True)
    first = f"{_time(stats['first_batch_seconds'])} of it for first batches"
    table.add_row("waiting", _time(stats["wait_seconds"]), f"{stats['wait_share']:.1%}", first)
    table.add_row("training", _time(stats["train_seconds"]), f"{stats['train_share']:.1%}", "", end_section=True)
    _stage_rows(table, stats)
    _worker_rows(table, stats)
    return table


def _title(stats: dict[str, Any]) -> str:
    workers, threads, processes = stats["workers"], stats["threads_per_worker"], stats["processes"]
    parts = [f"DataLoader: {stats['executor']}"]
    if workers:
        of = f" of {threads} threads" if threads > 1 else ""
        within = f" in {counted(processes, 'process')}" if processes not in (0, workers) else ""
        parts.append(counted(workers, "worker") + of + within)
    if stats.get("split_by") == "the loader":
        parts.append("split by the loader")
    return ", ".join(parts if stats["executor"] == "ray" else [*parts, counted(stats["cores"], "core")])


def _stage_rows(table: Table, stats: dict[str, Any]) -> None:
    stages = {name: seconds for name, seconds in stats["stages"].items() if seconds > 0}
    total = sum(stages.values())
    busy = f"workers {_RunFigures(stats).busy:.0%} busy" if stats["workers"] else ""
    table.add_row("work", _time(total), "", busy)
    for name, seconds in stages.items():
        each = f"{_time(seconds / stats['samples'])} a sample" if stats["samples"] else ""
        table.add_row(Text(f"  {name}"), _time(seconds), _percent(seconds, total, 1), each)
    table.add_section()


def _worker_rows(table: Table, stats: dict[str, Any]) -> None:
    queue, ways, errors = stats["queue"], stats["ways"], stats["errors"]
    if stats["workers"]:
        table.add_row("ready on request", f"{queue['ready']:.1f}", f"{queue['occupancy']:.0%}", _depth(queue))
    for way, count in sorted(ways.items()) if set(ways) - {"local"} else ():
        table.add_row(f"via {way}", f"{count:,}", _percent(count, stats["batches"], 1), "")
    if (copies := stats["copies"])["batches"]:
        ahead = f"{_percent(copies['ahead'], copies['batches'])} ahead"
        each = f"{_time(copies['seconds'] / copies['batches'])} a batch, in hand-over"
        table.add_row("copied to device", f"{copies['batches']:,}", ahead, each)
    if stats["failed_batches"]:
        table.add_row("failed batches", f"{stats['failed_batches']:,}", "", "")
    if errors.get("failed"):
        types = ", ".join(f"{name} {count:,}" for name, count in sorted(errors.get("types", {}).items()))
        share = _percent(errors["failed"], errors.get("samples", 0), 2)
        table.add_row("bad samples", f"{errors['failed']:,}", share, Text(types))
    for name, node in sorted(stats.get("nodes", {}).items()):
        each = f", {_time(node['seconds'] / node['batches'])} a batch" if node["batches"] else ""
        lost = f", {node['lost']:,} lost" if node["lost"] else ""
        share = _percent(node["batches"], stats["batches"], 1)
        workers = counted(node["workers"], "worker")
        table.add_row(Text(f"node {name}"), f"{node['batches']:,}", share, workers + each + lost)
    if stats["restarts"]:
        table.add_row("workers replaced", f"{stats['restarts']:,}", "", "")


def _depth(queue: dict[str, Any]) -> str:
    text = f"of {queue['depth']:.1f} in flight"
    short = queue["depth"] < 0.95 * queue["prefetch"]
    return text if not short else f"{text}, {queue['prefetch']} planned"


def print_report(stats: dict[str, Any], file: IO[str] | None = None) -> None:
    """Print the table and the verdict to a file; standard output by default."""
    console = Console(file=file, highlight=False)
    console.print(render(stats))
    if "tuning" in stats:
        console.print(Text(_choice(stats["tuning"])))
    console.print(Text(diagnose(stats).sentence))


def _choice(tuning: dict[str, Any]) -> str:
    """Return a sentence about the setting that ``num_workers="auto"`` chose and the ones it tried."""
    tried = [f"{Setting(one['executor'], one['workers'])}: {_tried(one)}" for one in tuning["tried"]]
    chosen = tuning["chosen"]
    if chosen is None:
        return "Auto-tuning is still choosing workers" + (f". So far {'; '.join(tried)}." if tried else ".")
    return f"Workers chosen: {Setting(**chosen).arguments}, {tuning['why']}. Tried: {'; '.join(tried)}."


def _tried(one: dict[str, Any]) -> str:
    rate = f"{_digits(one['samples_per_second'])} samples/s"
    if one["estimated"]:
        return f"{rate}, not measured"
    return one["error"] or f"{rate}, waiting {one['wait_share']:.0%}"


def _percent(part: float, whole: float, digits: int = 0) -> str:
    return f"{part / whole:.{digits}%}" if whole else ""


def _digits(value: float) -> str:
    """Return a number with three significant digits."""
    return f"{value:,.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f}"


def _time(seconds: float) -> str:
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{_digits(seconds / size)} {unit}"
    return f"{_digits(seconds * 1e6)} µs"
