"""The plot of ``penstock plan``: bottlenecks, memory of a node, and cache hits by size of the cache."""

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

_POINTS = 24  # points of the curves over the cache size


def check_matplotlib() -> None:
    """Check that plots can be drawn.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib, which is not installed: pip install matplotlib")


def draw(path: Path, plan: Plan) -> None:
    """Draw a plan into a file; its extension is the format.

    Raises:
        ConfigError: matplotlib cannot write the file.
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
    """Draw the samples/s that each resource allows, in the first and the last epoch."""
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
    axes.set_title(f"limit: {epochs[0].limit}, then {epochs[1].limit}", fontsize=10)
    axes.invert_yaxis()
    axes.legend(fontsize=8)


def _memory(axes: Any, plan: Plan) -> None:
    """Draw the private and the mapped memory of a full node."""
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
    """Draw the cache hits of the last epoch over the size of the cache."""
    from penstock.tools.planning import hit_rates

    job = plan.job
    data = job.samples * job.sample_bytes
    sizes = [round(data * k / _POINTS) for k in range(_POINTS + 1)]
    for kind in sorted(plan.hit_rates, key="block".__eq__):
        rates = [hit_rates(replace(job, cache_bytes=size), kind)[-1] for size in sizes]
        style = "--" if kind == "block" else "-"  # dashed: block equals global for reads of one row
        axes.plot([size / data for size in sizes], rates, style, label=kind)
    axes.axvline(min(1.0, job.cache_bytes / data), color="black", linewidth=0.8, linestyle="--")
    axes.set(xlabel="cache of a node / data", ylabel="hits", ylim=(-0.02, 1.02))
    axes.set_title(f"cache hits in epoch {job.epochs}", fontsize=10)
    axes.legend(fontsize=8)
