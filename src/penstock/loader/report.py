"""`loader.report()`: the statistics of a loader as a table, and one sentence: what limits the run, and what to change.

The verdict rests on how long the consumer waited, the first batch of a pass aside: under 5 % of the time, the training
sets the pace. Otherwise the time that the workers were busy tells a shortage of workers from everything that keeps
idle ones from delivering: batches that the program holds on to, limits of memory, the hand-over, slow samples.
"""

from __future__ import annotations

import math
from typing import IO, Any, NamedTuple

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from penstock.loader.setting import Setting
from penstock.loader.throughput import ENOUGH
from penstock.wording import counted

__all__ = ["Verdict", "diagnose", "print_report", "render", "summarize"]

_BATCHES, _SECONDS = 20, 1.0  # fewer say nothing
_BUSY = 0.7  # workers that are at work for this share of the time cannot do much more: batches are not all alike
_FULL = 0.9  # cores that work for this share of the time have none left for another worker
_CLEARLY = 0.8  # share of the time in which the run would have been done without workers, for it to be said
_STARVED = 0.1  # share of a core that a worker gets where they are scarce, at least
_MANY = 0.1  # share of the batches that went another way
_LARGE = 100_000  # bytes of a batch for which it matters how it comes
_SPARE = 1.1  # workers suggested, over those that would just keep up
_MOST = 64  # no more are suggested
_LIMITS = {"start": "first batches"}


class Verdict(NamedTuple):
    """What limits a run.

    Attributes:
        limit: "training", "data", "memory", "start" (of passes), or "unknown" when there is too little to go by.
        sentence: the same in words, and what to change.
        stage: the stage that takes longest, where making batches limits the run; "" elsewhere.
    """

    limit: str
    sentence: str
    stage: str = ""


class _Run:
    """What the verdict needs to know, from ``stats()``."""

    def __init__(self, stats: dict[str, Any]) -> None:
        self.stats = stats
        self.executor: str = stats["executor"]
        self.cores: int = stats["cores"]
        self.batches: int = stats["batches"]
        self.threads: int = max(1, stats["threads_per_worker"])
        self.workers: int = max(1, stats["workers"]) * self.threads  # that work at the same time
        self.first: float = stats["first_batch_seconds"]
        self.waited = max(0.0, stats["wait_seconds"] - self.first)
        self.seconds = stats["seconds"] - self.first
        self.train: float = stats["train_seconds"]
        self.hand_over: float = stats["stages"].get("hand-over", 0.0)
        self.work: float = sum(stats["stages"].values()) - self.hand_over
        self.cpu: float = stats["cpu_seconds"]
        self.used = self.cpu / self.seconds if self.seconds > 0 else 0.0  # cores, by the data set
        self.here: bool = self.executor != "ray"  # whether the work is done on this machine
        self.full: bool = self.here and (self.used > 0.8 * self.cores or (stats["cores_busy"] or 0.0) > _FULL)
        fetch = self.work - stats["stages"].get("collate", 0.0)
        computing = min(1.0, self.cpu / fetch) if self.cpu > 0 and fetch > 0 else 1.0
        # The rest it waits: for storage, or a lock. Where cores are scarce rather for one of them, up to a point.
        self.computing: float = 1.0 if self.full and computing > _STARVED else computing

    @property
    def started(self) -> int:
        """Workers that have found room in the cluster."""
        return sum(node["workers"] for node in self.stats.get("nodes", {}).values())

    @property
    def share(self) -> float:
        """Of its time that the run waited."""
        return self.waited / self.seconds if self.seconds > 0 else 0.0

    @property
    def busy(self) -> float:
        """Share of their time that the workers worked."""
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
        """The cores."""
        return counted(self.cores, "core") + (" that have no time left" if self.full else "")

    @property
    def needed(self) -> int:
        """Workers that would keep up with the training, if each goes on as fast as now."""
        workers = _SPARE * self.work / max(self.train, 1e-9) / self.threads
        return max(1, min(_MOST, math.ceil(workers)))

    def affordable(self, workers: int) -> int:
        """No more workers than there are cores for. Those that wait for storage most of their time need none."""
        if not self.here:
            return workers
        if self.computing < 0.5:
            return min(workers, 4 * max(1, self.workers))
        if self.full:
            return max(1, min(workers, self.workers // self.threads))
        return max(1, min(workers, self.cores // self.threads))

    def gain(self, workers: int) -> str:
        """How much faster the run can be with so many workers: the training, or they, set the pace."""
        pace = max(self.train, self.work / (workers * self.threads), 1e-9)
        return f"up to {max(1.0, self.seconds / pace):.1f}x"

    @property
    def longest(self) -> str:
        """The stage that takes longest."""
        stages: dict[str, float] = {**self.stats["stages"], "hand-over": 0.0}
        return max(stages, key=lambda name: stages[name])

    @property
    def costliest(self) -> str:
        """The same in words, with its share."""
        return f"{self.longest!r} ({_percent(self.stats['stages'][self.longest], self.work)} of the work)"


def diagnose(stats: dict[str, Any]) -> Verdict:
    """What limits the run with these statistics, of `Statistics.stats`."""
    run = _Run(stats)
    if run.batches < _BATCHES or stats["seconds"] < _SECONDS:
        had = f"{counted(run.batches, 'batch')} in {_time(stats['seconds'])}"
        return Verdict(
            "unknown", f"Too early to say what limits this run: {had}; ask again after {_BATCHES} batches and a second."
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
    """Return one short line: samples/s, the share of the time spent waiting, and what limits the run once that shows.

    >>> summarize(DataLoader(range(10)).stats())
    '0.00 samples/s · waiting 0%'
    """
    verdict = diagnose(stats)
    parts = [f"{_digits(stats['samples_per_second'])} samples/s", f"waiting {_Run(stats).share:.0%}"]
    if verdict.limit != "unknown":
        parts.append(f"limited by {verdict.stage or _LIMITS.get(verdict.limit, verdict.limit)}")
    return " · ".join(parts)


def _start(run: _Run) -> str:
    stats = run.stats
    text = (
        f"Starting limits this run: the first batches of {stats['passes']:,} passes took "
        f"{_percent(run.first, stats['seconds'])} of the time, {_time(run.first / stats['passes'])} each"
    )
    if stats["workers"] and not stats["persistent_workers"]:
        return f"{text}; persistent_workers=True keeps the workers from pass to pass."
    return f"{text}; longer passes have fewer of them."


def _training(run: _Run) -> str:
    text = f"Training limits this run: {run.waiting}, so a faster loader gains next to nothing"
    workers = run.stats["workers"]
    if 2 * run.needed <= workers and "tuning" not in run.stats:
        return f"{text}, and num_workers={run.needed} instead of {workers} would do."
    return f"{text}; nothing needs to change here."


def _tuned(run: _Run) -> str:
    """What is left to do when executor and number of workers were chosen by trying."""
    if run.busy < _BUSY and (why := _memory(run)):
        return f"Memory limits this run: {run.waiting}, and {why}."
    return (
        f"Data limits this run: {run.waiting}, with the best of the settings that were tried; make {run.costliest} "
        "cheaper, or give it more cores."
    )


def _inline(run: _Run) -> str:
    workers = run.affordable(run.needed)
    return (
        f"Data limits this run: {run.waiting}, because batches are made only when the training asks for them; "
        f"num_workers={workers} makes them beside it, which can make the run {run.gain(workers)} faster."
    )


def _memory(run: _Run) -> str:
    """Why workers that have time cannot deliver, if memory is the reason."""
    ways, queue = run.stats["ways"], run.stats["queue"]
    copied, piped = ways.get("copy", 0), ways.get("pipe", 0)
    if copied > _MANY * run.batches:
        return (
            f"{_percent(copied, run.batches)} of the batches had to be copied, because the program still holds "
            "earlier ones; keep fewer batches (or views of them) alive, or clone() the little that is kept"
        )
    if queue["depth"] < 0.75 * queue["prefetch"]:
        return (
            f"only {queue['depth']:.1f} of the {queue['prefetch']} batches that prefetch_factor asks for could be "
            "begun at a time; raise max_bytes_in_flight or the memory limit, or make batches smaller"
        )
    large = run.stats["bytes"] >= _LARGE * run.batches  # others lose nothing on the way
    if large and piped > max(_MANY * run.batches, 2 * run.stats["workers"] * run.stats["passes"]):
        return (
            f"{_percent(piped, run.batches)} of the batches did not fit into a slot of shared memory and went through "
            "a pipe; batches of about the same size (padded, or grouped by size) do fit"
        )
    return ""


def _pending(run: _Run) -> str:
    return (
        f"only {run.started} of its {counted(run.stats['workers'], 'worker')} have found room in the cluster; add "
        "nodes, or ask for less by RayOptions(num_cpus=, resources=, label_selector=)"
    )


def _needless(run: _Run) -> str:
    return (
        f"Handing over limits this run: {run.waiting}, and making all of its batches took {_time(run.work)}; "
        f"num_workers=0 makes them where they are needed, which can make the run up to {run.seconds / run.alone:.1f}x "
        "faster, and so can larger batches."
    )


def _too_few(run: _Run) -> str:
    """What to do when all workers are busy."""
    workers: int = run.stats["workers"]
    processes = max(1, run.stats["processes"])
    many = f"its {workers} worker{'s were' if workers > 1 else ' was'} busy {run.busy:.0%} of it"
    more = run.affordable(max(run.needed, workers + 1))
    if run.workers > processes and run.computing < 0.75 and 0.4 < run.used / processes < 1.25:
        return (
            f"its {run.workers} threads used {run.used:.1f} cores of {run.cores}: if they run Python code they take "
            "turns, and executor='process' with threads_per_worker=1 runs them side by side; if they wait for storage, "
            f"num_workers={more} may help"
        )
    if run.computing < 0.5:
        reason = f"most of that ({1 - run.computing:.0%}) waiting for storage or a lock"
        return f"{many}, {reason}; num_workers={more} can make it {run.gain(more)} faster"
    if more <= workers:
        cheaper = f"make {run.costliest} cheaper, or give it more cores"
        return f"{many}, on {run.where}, so more workers would not help; {cheaper}"
    text = f"{many}; num_workers={more} can make it {run.gain(more)} faster"
    return text if more >= run.needed else f"{text}, a cheaper {run.costliest} even more"


def _idle(run: _Run) -> str:
    """What to do when workers have time, memory is no reason, and still the consumer waits."""
    queue = run.stats["queue"]
    busy = f"its workers were busy only {run.busy:.0%} of it"
    if run.hand_over > 0.4 * run.waited:
        other = "executor='thread' hands over for nothing, for data sets that release the GIL"
        if run.executor == "thread":
            other = "pin_memory=False saves the copy"
        if run.stats["copies"]["batches"]:
            other = "smaller types (uint8 for images) are copied to the device in less time"
        return f"{busy}, while handing batches over took {_time(run.hand_over)}; return less data, or {other}"
    factor: int = -(-queue["prefetch"] // run.stats["workers"])
    if queue["occupancy"] > 0.3:
        return (
            f"{busy}, with {queue['ready']:.1f} batches ready on average: now and then a slow one holds up the others; "
            f"prefetch_factor={2 * factor} rides over that"
        )
    if run.full:
        return f"{busy}, on {run.where}; make {run.costliest} cheaper, or give it more cores"
    return (
        f"{busy}, with hardly a batch ready: what is planned in the main process (the sampler) is slow, or too little "
        f"is begun at a time; try prefetch_factor={2 * factor}"
    )


def render(stats: dict[str, Any]) -> Table:
    """The table."""
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
    busy = f"workers {_Run(stats).busy:.0%} busy" if stats["workers"] else ""
    table.add_row("work", _time(total), "", busy)
    for name, seconds in stages.items():
        each = f"{_time(seconds / stats['samples'])} a sample" if stats["samples"] else ""
        table.add_row(Text(f"  {name}"), _time(seconds), _percent(seconds, total, 1), each)
    table.add_section()


def _worker_rows(table: Table, stats: dict[str, Any]) -> None:
    queue, ways, errors = stats["queue"], stats["ways"], stats["errors"]
    if stats["workers"]:
        table.add_row("ready when asked", f"{queue['ready']:.1f}", f"{queue['occupancy']:.0%}", _depth(queue))
    for way, count in sorted(ways.items()) if set(ways) - {"local"} else ():
        table.add_row(f"by {way}", f"{count:,}", _percent(count, stats["batches"], 1), "")
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
    if stats.get("hedged_batches"):
        table.add_row("made twice", f"{stats['hedged_batches']:,}", "", "a worker was slow")
    if stats["restarts"]:
        table.add_row("workers replaced", f"{stats['restarts']:,}", "", "")


def _depth(queue: dict[str, Any]) -> str:
    text = f"of {queue['depth']:.1f} begun"
    short = queue["depth"] < 0.95 * queue["prefetch"]
    return text if not short else f"{text}, {queue['prefetch']} wanted"


def print_report(stats: dict[str, Any], file: IO[str] | None = None) -> None:
    """Print the table and the sentence, to standard output by default."""
    console = Console(file=file, highlight=False)
    console.print(render(stats))
    if "tuning" in stats:
        console.print(Text(_choice(stats["tuning"])))
    console.print(Text(diagnose(stats).sentence))


def _choice(tuning: dict[str, Any]) -> str:
    """What was chosen for ``num_workers="auto"``, and from what."""
    tried = [f"{Setting(one['executor'], one['workers'])}: {_tried(one)}" for one in tuning["tried"]]
    chosen = tuning["chosen"]
    if chosen is None:
        return "Workers are being chosen" + (f". So far {'; '.join(tried)}." if tried else ".")
    return (
        f"Workers chosen: {Setting(**chosen).arguments}, {tuning['why']}. Tried: {'; '.join(tried)}. {_touched(tuning)}"
    )


def _tried(one: dict[str, Any]) -> str:
    rate = f"{_digits(one['samples_per_second'])} samples/s"
    if one["estimated"]:
        return f"{rate}, not measured"
    return one["error"] or f"{rate}, waiting {one['wait_share']:.0%}"


def _touched(tuning: dict[str, Any]) -> str:
    """How often tuning has touched the user's objects."""
    text = f"For that the data set was copied into {counted(tuning['dataset_copies'], 'process')}"
    calls = tuning["worker_init_fn_calls"]
    return f"{text}, and worker_init_fn was called {counted(calls, 'time')}." if calls else f"{text}."


def _percent(part: float, whole: float, digits: int = 0) -> str:
    return f"{part / whole:.{digits}%}" if whole else ""


def _digits(value: float) -> str:
    """Three digits that matter."""
    return f"{value:,.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f}"


def _time(seconds: float) -> str:
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{_digits(seconds / size)} {unit}"
    return f"{_digits(seconds * 1e6)} µs"
