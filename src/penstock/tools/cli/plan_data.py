"""``penstock plan`` for data: samples of each source, stages of weights, and a plot of the shares over the run."""

from __future__ import annotations

import json
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import ConfigError
from penstock.tools.cli.data_options import row_cells
from penstock.tools.cli.manifest_options import byte_size, console, figures, pairs, print_figures
from penstock.tools.cli.plan_page import html_table, plan_page
from penstock.wording import counted

if TYPE_CHECKING:
    from penstock.tools.planning.data import DataPlan, SourcePlan, StagePlan

__all__ = ["draw_data", "print_data", "write_page"]

_COLOURS = 8
_LETTER = 8  # width of the widest letter in a plot, in pixels


def print_data(plan: DataPlan) -> None:
    """Print the plan as tables."""
    console().print(_about(plan))
    print_figures(figures("Sources", _source_heads(plan), [_source_cells(plan, source) for source in plan.sources]))
    if len(plan.sources) > 1:
        print_figures(figures("Weights", _stage_heads(plan), list(map(_stage_cells, plan.stages))))
    console().print(pairs("State", _state_rows(plan)))
    for note in _notes(plan):
        console().print(note)


def _about(plan: DataPlan) -> str:
    whole = plan.steps_per_epoch * plan.epochs
    return (
        f"{counted(plan.samples, plan.unit)} an epoch of {counted(len(plan.sources), 'source')}; "
        f"{counted(plan.ranks, 'rank')} x {plan.batch_size}: {counted(plan.steps_per_epoch, 'step')} an epoch, "
        f"{whole:,} in {counted(plan.epochs, 'epoch')}"
    )


def _source_heads(plan: DataPlan) -> list[str]:
    more = ["excluded"] if _excludes(plan) else []
    more += ["packs", "tokens"] if plan.unit == "pack" else []
    return ["", "rows", "kept", *more, "share", "in the run", "epochs", "unused", "repeats from step"]


def _source_cells(plan: DataPlan, source: SourcePlan) -> list[str]:
    more = [f"{source.excluded:,}"] if _excludes(plan) else []
    if plan.unit == "pack":
        more += [f"{source.samples:,}", "" if source.tokens is None else f"{source.tokens:,}"]
    return [
        *row_cells(source),
        *more,
        f"{source.had / (plan.samples * plan.epochs):.2%}",
        f"{source.had:,}",
        f"{source.passes:,.2f}",
        f"{source.never:,}",
        "" if source.again_step is None else f"{source.again_step:,}",
    ]


def _excludes(plan: DataPlan) -> bool:
    return any(source.excluded for source in plan.sources)


def _stage_heads(plan: DataPlan) -> list[str]:
    return ["from sample", "from step", "with set_weights", *(source.name for source in plan.sources)]


def _stage_cells(stage: StagePlan) -> list[str]:
    step = "" if stage.step is None else f"{stage.step:,}"
    return [f"{stage.begin:,}", step, f"{stage.bound:,}", *(f"{share:.2%}" for share in stage.shares)]


def _state_rows(plan: DataPlan) -> list[tuple[str, str]]:
    rows = [("a state", f"{plan.state_bytes:,} bytes for the dataset, on any number of ranks")]
    if plan.filter_bytes:
        rows.append(("filters", f"{byte_size(plan.filter_bytes)} mapped, once per machine"))
    if len(plan.sources) > 1:
        rows.append(("a block", f"{plan.block_size:,} samples at most; set_weights takes effect at the end of a block"))
        rows.append(("deviation", f"fewer than {counted(plan.bound, 'sample')} of a source, anywhere in an epoch"))
    return rows


def _notes(plan: DataPlan) -> list[str]:
    notes = []
    for source in plan.sources:
        if source.excluded:
            unit = "document" if plan.unit == "pack" else "row"
            said = counted(source.excluded, f"excluded {unit}")
            notes.append(f"{source.name}: its {said} are replaced by others")
        if source.never and source.had:
            notes.append(f"{source.name}: {source.never / source.samples:.1%} of it is not used in this run")
        elif not source.had:
            notes.append(f"{source.name}: it is not used in this run")
    most = max(plan.sources, key=lambda source: source.passes)
    if len(plan.sources) > 1 and most.again_step is not None:
        notes.append(f"{most.name} repeats most: {most.passes:,.1f} epochs, with repeats from step {most.again_step:,}")
    return notes


# Plots.


def draw_data(path: Path, plan: DataPlan) -> None:
    """Draw the share of each source over the steps, and its epochs.

    Raises:
        ConfigError: matplotlib cannot write the file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    high = min(100, max(4, 0.25 * len(plan.sources)))
    figure = Figure(figsize=(13, high), layout="constrained")
    FigureCanvasAgg(figure)
    shares, passes = figure.subplots(1, 2, width_ratios=(3, 1))
    # A dollar sign would start a formula.
    names = [source.name.replace("$", r"\$") for source in plan.sources]
    colours = _colours(len(names))
    last = plan.steps_per_epoch * plan.epochs
    curve = [*plan.curve, plan.curve[-1]]
    shares.stackplot([*plan.steps, last], *zip(*curve, strict=True), colors=colours, step="post")
    shares.xaxis.set_major_locator(MaxNLocator(integer=True))
    shares.set(xlabel="step", ylabel="share", ylim=(0, 1), xlim=(0, last), title="share of each source")
    # The bars serve as the legend, which would cover the areas.
    bars = passes.barh(names, [source.passes for source in plan.sources], color=colours)
    passes.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
    passes.margins(x=0.2)
    passes.invert_yaxis()
    passes.set(title="epochs in the run")
    figure.suptitle(_about(plan), fontsize=11)
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot draw into {str(path)!r}: {error}") from error


def _colours(count: int) -> list[tuple[float, ...]]:
    """Return ``count`` different colours."""
    from matplotlib import colormaps

    for name, size in (("tab10", 10), ("tab20", 20)):
        if count <= size:
            return [colormaps[name](k) for k in range(count)]
    return [colormaps["turbo"](k / (count - 1)) for k in range(count)]


def write_page(path: Path, plan: DataPlan) -> None:
    """Write an HTML page with the tables, the shares over the run, and the plan as JSON."""
    body = [html_table(_source_heads(plan), [_source_cells(plan, source) for source in plan.sources])]
    if len(plan.sources) > 1:
        body += ["<h2>Weights</h2>", html_table(_stage_heads(plan), list(map(_stage_cells, plan.stages)))]
        body += ["<h2>Share of each source, by step</h2>", _areas(plan)]
    told = json.dumps(asdict(plan)).replace("<", "\\u003c")
    body.append(f'<script type="application/json" id="plan">{told}</script>')
    notes = [*(f"{name}: {value}" for name, value in _state_rows(plan)), *_notes(plan)]
    path.write_text(plan_page("The data of a run", _about(plan), body, notes), encoding="utf-8")


def _areas(plan: DataPlan) -> str:
    """Return an SVG of the shares as stacked areas over the steps."""
    wide, high, last = 800, 220, plan.steps_per_epoch * plan.epochs
    ends = [*plan.steps[1:], last]
    parts, legend = [], []
    columns = max(1, min(_COLOURS, wide // (_LETTER * max(len(source.name) + 3 for source in plan.sources))))
    for number, source in enumerate(plan.sources):
        top, bottom = [], []
        for begin, end, shares in zip(plan.steps, ends, plan.curve, strict=True):
            low, up = sum(shares[:number]), sum(shares[: number + 1])
            xs = [round(wide * step / last, 1) for step in (begin, end)]
            top += [f"{x},{round(high * (1 - up), 1)}" for x in xs]
            bottom += [f"{x},{round(high * (1 - low), 1)}" for x in xs]
        fill, x = _fill(number, len(plan.sources)), wide // columns * (number % columns)
        parts.append(f'<polygon {fill} points="{" ".join([*top, *reversed(bottom)])}"/>')
        y = high + 34 + 20 * (number // columns)
        legend.append(f'<rect {fill} x="{x}" y="{y - 10}" width="10" height="10"/>')
        legend.append(f'<text x="{x + 14}" y="{y}">{escape(source.name)}</text>')
    axis = f'<text class="axis" x="0" y="{high + 16}">0</text>'
    axis += f'<text class="axis" x="{wide}" y="{high + 16}" text-anchor="end">step {last:,}</text>'
    tall = high + 44 + 20 * ((len(plan.sources) - 1) // columns)
    return (
        f'<svg viewBox="0 0 {wide} {tall}" role="img" aria-labelledby="shares-title shares-desc">'
        '<title id="shares-title">Share of each source over the run</title>'
        f'<desc id="shares-desc">{escape("; ".join(_in_words(plan)))}</desc>{"".join([*parts, axis, *legend])}</svg>'
    )


def _fill(number: int, count: int) -> str:
    """Return the colour of a source; with few sources, one from the page's style."""
    return f'class="s{number}"' if count <= _COLOURS else f'fill="hsl({360 * number / count:.1f},60%,50%)"'


def _in_words(plan: DataPlan) -> list[str]:
    """Return the stages as text."""
    names = [source.name for source in plan.sources]
    return [
        f"from step {stage.step:,}: "
        + ", ".join(f"{name} {share:.1%}" for name, share in zip(names, stage.shares, strict=True))
        for stage in plan.stages
        if stage.step is not None
    ]
