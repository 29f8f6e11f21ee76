"""The picture of ``penstock plan``: what limits, where memory goes, what more cache would bring."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError
from penstock.wording import counted

if TYPE_CHECKING:
    from penstock.tools.planning import Plan

__all__ = ["check_matplotlib", "draw"]

_POINTS = 24  # of the curves over the cache


def check_matplotlib() -> None:
    """Whether pictures can be drawn.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot draws with matplotlib, which is not installed: pip install matplotlib")


def draw(path: Path, plan: Plan) -> None:
    """Draw a plan into a file, of the type that its name ends with.

    Raises:
        ConfigError: matplotlib cannot write it there.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4), layout="constrained")
    FigureCanvasAgg(figure)
    rates, memory, cache = figure.subplots(1, 3)
    _rates(rates, plan)
    _memory(memory, plan)
    _cache(cache, plan)
    job = plan.job
    ranks, nodes = counted(job.ranks, "rank"), counted(job.nodes, "node")
    figure.suptitle(f"{counted(job.samples, 'sample')}, {ranks} on {nodes}, {job.shuffle} shuffle")
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot draw into {str(path)!r}: {error}") from error


def _rates(axes: Any, plan: Plan) -> None:
    """What each thing allows, in the first epoch and in the last one."""
    epochs = [plan.epochs[0], plan.epochs[-1]]
    things = list(dict.fromkeys(name for epoch in epochs for name in epoch.ceilings))
    for k, (epoch, title) in enumerate(zip(epochs, ("epoch 1", f"epoch {len(plan.epochs)}"), strict=True)):
        places = [row + 0.4 * k - 0.2 for row in range(len(things))]
        axes.barh(places, [epoch.ceilings.get(name, 0.0) for name in things], 0.4, label=title)
    step = plan.epochs[0].ceilings.get("step")
    if step is not None:
        axes.axvline(step, color="black", linewidth=0.8, linestyle="--")
    lowest = min(value for epoch in epochs for value in epoch.ceilings.values())
    axes.set(
        xscale="log",
        xlim=(lowest / 4, None),
        yticks=range(len(things)),
        yticklabels=things,
        xlabel="samples/s of a node",
    )
    axes.set_title(f"what limits: {epochs[0].limit}, then {epochs[1].limit}", fontsize=10)
    axes.invert_yaxis()
    axes.legend(fontsize=8)


def _memory(axes: Any, plan: Plan) -> None:
    """Private memory of a full node, and what is mapped."""
    job, memory = plan.job, plan.memory
    parts = {
        "ranks": job.ranks_here * memory.rank,
        "workers": job.ranks_here * job.workers * memory.worker,
        "rings": job.ranks_here * memory.ring,
        "mapped": memory.node_mapped,
    }
    axes.bar(list(parts), [value / 1e9 for value in parts.values()], color=["C0", "C1", "C2", "0.8"])
    axes.set(ylabel="GB", title="memory of a node")


def _cache(axes: Any, plan: Plan) -> None:
    """Hits in the last epoch planned, over the size of the cache."""
    from penstock.tools.planning import hit_rates

    job = plan.job
    data = job.samples * job.sample_bytes
    sizes = [round(data * k / _POINTS) for k in range(_POINTS + 1)]
    for kind in sorted(plan.hit_rates, key="block".__eq__):
        rates = [hit_rates(replace(job, cache_bytes=size), kind)[-1] for size in sizes]
        style = "--" if kind == "block" else "-"  # it is the same as global where single rows are read
        axes.plot([size / data for size in sizes], rates, style, label=kind)
    axes.axvline(min(1.0, job.cache_bytes / data), color="black", linewidth=0.8, linestyle="--")
    axes.set(xlabel="cache of a node / data", ylabel="hits", ylim=(-0.02, 1.02))
    axes.set_title(f"cache hits in epoch {job.epochs}", fontsize=10)
    axes.legend(fontsize=8)
