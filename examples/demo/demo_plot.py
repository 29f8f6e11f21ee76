"""The demo's picture: the killed run step by step, and the three orders beside each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from demo_history import Attempt, last_tests, surviving

from penstock.wording import counted

if TYPE_CHECKING:
    from demo import Plan

__all__ = ["draw"]

_RANKS = {1: "#e07b00", 2: "#1f6fb4"}
_ORDERS = {"none": "#9a9a9a", "global": "#1f6fb4", "torch": "#2e9e5b"}
_KILL = "#c62828"


def draw(
    path: Path,
    plan: Plan,
    attempts: Sequence[Attempt],
    runs: Mapping[str, Sequence[Attempt]],
    names: Mapping[str, str],
) -> bool:
    """Write the plot as PNG; False where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(12, 6), layout="constrained")
    FigureCanvasAgg(figure)
    parts: Any = figure.subfigures(1, 2, width_ratios=(3, 2))
    left, right = parts
    loss, accuracy = left.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    _draw_loss(loss, attempts, runs["global"][0])
    _draw_accuracy(accuracy, plan, attempts, runs["global"][0])
    accuracy.legend(*loss.get_legend_handles_labels(), fontsize=8, loc="lower right")
    left.suptitle("Killed twice, resumed on other numbers of ranks", fontweight="bold")
    _draw_orders(right.subplots(), plan, runs, names)
    right.suptitle(f"Same training, three orders, {counted(len(plan.seeds), 'seed')}", fontweight="bold")
    figure.savefig(path, dpi=110)
    return True


def _draw_loss(axes: Any, attempts: Sequence[Attempt], whole: Attempt) -> None:
    steps = surviving(attempts)
    axes.plot(*_smooth([step.number for step in whole.steps], [step.loss for step in whole.steps]),
              color="black", linewidth=3.5, alpha=0.2, label="never killed, same seed, 1 rank")  # fmt: skip
    smooth = dict(zip(*_smooth([step.number for step in steps], [step.loss for step in steps]), strict=True))
    seen: set[int] = set()
    for number, attempt in enumerate(attempts):
        last = min((later.start for later in attempts[number + 1 :]), default=attempt.end)
        numbers = [step.number for step in attempt.steps if step.number <= last]
        raw = [step.loss for step in attempt.steps if step.number <= last]
        color = _RANKS[attempt.ranks]
        axes.plot(numbers, raw, ".", color=color, markersize=2, alpha=0.45)
        label = None if attempt.ranks in seen else counted(attempt.ranks, "rank")
        axes.plot(numbers, [smooth[n] for n in numbers], color=color, linewidth=1.6, label=label)
        seen.add(attempt.ranks)
        if attempt.end > last:
            axes.axvspan(last, attempt.end, color=_KILL, alpha=0.15, linewidth=0,
                         label="lost, done again" if number == len(attempts) - 2 else None)  # fmt: skip
            axes.axvline(attempt.end, color=_KILL, linewidth=1)
            axes.annotate(f"killed at {attempt.end}\nresumed at {last}", (attempt.end, axes.get_ylim()[1]),
                          xytext=(4, -3), textcoords="offset points", color=_KILL, fontsize=8, va="top")  # fmt: skip
    axes.set_ylabel("training loss")
    axes.grid(alpha=0.2)


def _draw_accuracy(axes: Any, plan: Plan, attempts: Sequence[Attempt], whole: Attempt) -> None:
    axes.plot([test.step for test in whole.tests], [100 * test.accuracy for test in whole.tests],
              color="black", linewidth=3.5, alpha=0.2)  # fmt: skip
    ranks_of = {id(test): attempt.ranks for attempt in attempts for test in attempt.tests}
    measured = list(last_tests(attempts).values())
    tests = [(test.step, 100 * test.accuracy, ranks_of[id(test)]) for test in measured]
    axes.plot([test[0] for test in tests], [test[1] for test in tests], color="#666666", linewidth=1)
    for step, accuracy, ranks in tests:
        axes.plot(step, accuracy, "o", color=_RANKS[ranks])
        axes.annotate(f"{accuracy:.1f}", (step, accuracy), xytext=(-6, 5), textcoords="offset points",
                      fontsize=8, ha="right")  # fmt: skip
    for attempt in attempts[:-1]:
        axes.axvline(attempt.end, color=_KILL, linewidth=1)
    axes.set_xticks([epoch * plan.steps_per_epoch for epoch in range(plan.epochs + 1)])
    axes.set_xlabel(f"step ({plan.steps_per_epoch} are one epoch, {plan.batch_size} images each)")
    axes.set_ylabel("test accuracy, %")
    axes.margins(y=0.25)
    axes.grid(alpha=0.2)


def _draw_orders(axes: Any, plan: Plan, runs: Mapping[str, Sequence[Attempt]], names: Mapping[str, str]) -> None:
    epochs = np.arange(1, plan.epochs + 1)
    for order, attempts in runs.items():
        curves = 100 * np.array([[test.accuracy for test in attempt.tests] for attempt in attempts])
        axes.fill_between(epochs, curves.min(axis=0), curves.max(axis=0), color=_ORDERS[order], alpha=0.18, linewidth=0)
        style = "o--" if order == "torch" else "o-"
        label = f"{names[order]}: {curves[:, -1].mean():.1f} %"
        axes.plot(epochs, curves.mean(axis=0), style, color=_ORDERS[order], label=label, markersize=4)
    axes.axhline(10, color="black", linewidth=0.8, linestyle=":")
    axes.annotate("guessing", (1, 10), xytext=(0, -11), textcoords="offset points", fontsize=8)
    axes.set_ylim(0, None)
    axes.set_xticks(epochs)
    axes.set_xlabel("epoch")
    axes.set_ylabel("test accuracy, %: mean and range over the seeds")
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(0, 0.62))
    axes.grid(alpha=0.2)


def _smooth(numbers: Sequence[int], losses: Sequence[float], window: int = 9) -> tuple[Sequence[int], npt.NDArray[Any]]:
    """A centred running mean, shorter at both ends."""
    kernel = np.ones(min(window, max(1, len(losses))))
    weights = np.convolve(np.ones(len(losses)), kernel, mode="same")
    return numbers, np.convolve(losses, kernel, mode="same") / weights
