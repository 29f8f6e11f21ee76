"""What the demo shows in the end: were samples lost or repeated, what did it cost, did the order matter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from demo_history import Attempt, Step, count_samples, final_accuracy, last_tests, surviving
from rich.console import Console
from rich.table import Table

from penstock.wording import counted

if TYPE_CHECKING:
    from demo import Data, Plan

__all__ = ["print_results", "summary"]

# 97.5 % quantiles of Student's t for 2, 4, 6, 8 degrees of freedom: two groups of 2, 3, 4, 5 seeds.
_STUDENT = {2: 4.303, 4: 2.776, 6: 2.447, 8: 2.306}


def print_results(
    console: Console,
    plan: Plan,
    data: Data,
    attempts: Sequence[Attempt],
    runs: Mapping[str, Sequence[Attempt]],
    names: Mapping[str, str],
) -> bool:
    """Print the tables; whether every sample was trained on, and tested on, exactly once per epoch."""
    good = _print_epochs(console, plan, data, attempts)
    _print_jobs(console, attempts)
    good = _print_same_batches(console, attempts, runs["global"][0]) and good
    _print_orders(console, runs, names)
    _print_verdict(console, runs)
    return good


def summary(
    plan: Plan, data: Data, attempts: Sequence[Attempt], runs: Mapping[str, Sequence[Attempt]]
) -> dict[str, Any]:
    """What the tables show, for programs."""
    counts = count_samples(surviving(attempts), samples=data.samples, epochs=plan.epochs)
    jobs = [
        {
            "ranks": attempt.ranks,
            "steps": [attempt.start, attempt.end],
            "samples_per_second": attempt.samples_per_second,
            "waiting": attempt.waiting,
        }
        for attempt in attempts
    ]
    return {
        "samples": data.samples,
        "epochs": [{"fewest": int(seen.min()), "most": int(seen.max())} for seen in counts],
        "jobs": jobs,
        "accuracy": {order: [final_accuracy(run) for run in some] for order, some in runs.items()},
    }


def _print_epochs(console: Console, plan: Plan, data: Data, attempts: Sequence[Attempt]) -> bool:
    steps = surviving(attempts)
    counts = count_samples(steps, samples=data.samples, epochs=plan.epochs)
    tested = last_tests(attempts)
    table = Table(title="The run that was killed twice: how often each sample was seen", title_justify="left")
    for heading in ("epoch", "ranks", "samples", "min", "max", "loss", "test images", "accuracy"):
        table.add_column(heading, justify="right")
    good = True
    for epoch in range(plan.epochs):
        inside = [step for step in steps if step.epoch == epoch]
        fewest, most = int(counts[epoch].min()), int(counts[epoch].max())
        test = tested.get(epoch)
        right = fewest == most == 1 and test is not None and test.images == data.test_samples
        good = good and right
        table.add_row(
            str(epoch + 1),
            _ranks_of(inside, attempts),
            f"{counts[epoch].sum():,}",
            f"{fewest} x",
            f"{most} x",
            f"{np.mean([step.loss for step in inside]):.3f}" if inside else "",
            "" if test is None else f"{test.images:,}",
            "" if test is None else f"{test.accuracy:.1%}",
            style=None if right else "red",
        )
    console.print(table)
    if good:
        console.print("Each sample was seen exactly once per epoch: none lost, none repeated.", style="bold green")
    else:
        console.print("WRONG: samples were lost or repeated, see the rows in red.", style="bold red")
    console.print()
    return good


def _ranks_of(steps: Sequence[Step], attempts: Sequence[Attempt]) -> str:
    """The numbers of ranks that an epoch was trained on, in order: "2 -> 1"."""
    return " -> ".join(str(attempt.ranks) for attempt in attempts if any(step in attempt.steps for step in steps))


def _print_jobs(console: Console, attempts: Sequence[Attempt]) -> None:
    table = Table(title="The three jobs: speed, share of waiting for data, private memory", title_justify="left")
    for heading in ("job", "ranks", "steps", "lost", "samples/s", "waiting", "MiB of each rank"):
        table.add_column(heading, justify="right")
    for number, attempt in enumerate(attempts):
        later = [other.start for other in attempts[number + 1 :]]
        lost = attempt.end - min(later) if later else 0
        memory = [f"{size / 2**20:.0f}" for size in attempt.memory if size is not None]
        table.add_row(
            str(number + 1),
            str(attempt.ranks),
            f"{attempt.start + 1} to {attempt.end}",
            str(lost),
            f"{attempt.samples_per_second:,.0f}",
            f"{attempt.waiting:.1%}",
            ", ".join(memory) or "unknown",
        )
    console.print(table)
    console.print()


def _print_same_batches(console: Console, attempts: Sequence[Attempt], whole: Attempt) -> bool:
    """Compare the batches with those of the run with the same seed that nobody has killed."""
    steps, expected = surviving(attempts), whole.steps
    same = len(steps) == len(expected) and all(
        np.array_equal(np.sort(a.rows), np.sort(b.rows)) for a, b in zip(steps, expected, strict=True)
    )
    if same:
        console.print(f"All {len(steps)} batches are those of a run that was never killed.", style="bold green")
    else:
        console.print("WRONG: the batches are not those of a run that was never killed.", style="bold red")
    console.print()
    return same


def _print_orders(console: Console, runs: Mapping[str, Sequence[Attempt]], names: Mapping[str, str]) -> None:
    seeds = len(next(iter(runs.values())))
    table = Table(title=f"Test accuracy after the last epoch, {counted(seeds, 'seed')}", title_justify="left")
    table.add_column("order")
    table.add_column("")
    for heading in ("each seed", "mean", "std. error"):
        table.add_column(heading, justify="right")
    for order, attempts in runs.items():
        accuracies = [final_accuracy(attempt) for attempt in attempts]
        table.add_row(
            order,
            names[order],
            ", ".join(f"{accuracy:.1%}" for accuracy in accuracies),
            f"{np.mean(accuracies):.1%}",
            f"{np.std(accuracies, ddof=1) / math.sqrt(seeds):.1%}" if seeds > 1 else "",
        )
    console.print(table)


def _print_verdict(console: Console, runs: Mapping[str, Sequence[Attempt]]) -> None:
    """Means compared against the standard error of their difference, at 95 % confidence."""
    ours, torchs, unshuffled = ([final_accuracy(run) for run in runs[order]] for order in ("global", "torch", "none"))
    seeds = len(ours)
    if 2 * (seeds - 1) not in _STUDENT:
        console.print("One seed says nothing about noise: leave --quick out for a verdict.", style="yellow")
        return
    quantile = _STUDENT[2 * (seeds - 1)]
    difference, error = _difference(ours, torchs)
    text = f"global - torch: {100 * difference:+.1f} points, standard error {100 * error:.1f}"
    if abs(difference) <= quantile * error:
        console.print(f"{text}: the same within noise.", style="bold green")
    else:
        console.print(f"{text}: more than noise explains (bar {100 * quantile * error:.1f}).", style="bold red")
    gap, error = _difference(ours, unshuffled)
    text = f"global - none: {100 * gap:+.1f} points, standard error {100 * error:.1f}"
    if gap > quantile * error:
        console.print(f"{text}: sorted data is learned badly.", style="bold green")
    else:
        console.print(f"{text}: shuffling made no difference here.", style="bold red")


def _difference(a: Sequence[float], b: Sequence[float]) -> tuple[float, float]:
    """Difference of two means, and its standard error."""
    error = math.sqrt(np.var(a, ddof=1) / len(a) + np.var(b, ddof=1) / len(b))
    return float(np.mean(a) - np.mean(b)), error
