"""``penstock plan --packing``: padding and cost of packs of documents, as a table, a plot or an HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from penstock.errors import ConfigError
from penstock.tools.cli.manifest_options import console, print_figures, print_json
from penstock.tools.cli.plan_page import check_page, html_table, plan_page
from penstock.wording import counted

if TYPE_CHECKING:
    from penstock.tools.cli.plan_options import PackingOptions
    from penstock.tools.planning import Packing, PackingPlan

__all__ = ["print_packing"]

_RANKS = 8  # default number of ranks; a single rank would never wait for others
_PACKS = 8


def print_packing(
    given: PackingOptions, ranks: int | None, others: list[str], plot: Path | None, *, as_json: bool
) -> None:
    """Print the padding and the cost of packs, and draw them if requested.

    Args:
        given: the packing options.
        ranks: number of ranks; None for the default.
        others: options on the command line that packing does not use.
        plot: file for the plot.
        as_json: print one JSON object instead of tables.

    Raises:
        BadParameter: options that only the plan of a job uses.
        ConfigError: a plot or page that cannot be written.
    """
    from penstock.tools.planning import packing_plan

    if others:
        raise typer.BadParameter(
            f"--packing only compares packs: leave out {', '.join(others)}, or plan the job separately"
        )
    assert given.document_lengths is not None
    assert given.capacity is not None
    check_page(given.html)
    ranks = _RANKS if ranks is None else ranks
    batch = given.packs or _PACKS
    plan = packing_plan(
        given.document_lengths, given.capacity, max_documents=given.max_documents, ranks=ranks, batch=batch
    )
    if as_json:
        print_json({"packing": asdict(plan)})
    else:
        _print(plan)
    if given.html is not None:
        given.html.write_text(_page(plan), encoding="utf-8")
    if plot is not None:
        _draw(plot, plan)


def _headings(plan: PackingPlan) -> list[str]:
    return ["packs", "padding", "documents per pack", f"cost of {plan.ranks} ranks", "balanced"]


def _cells(way: Packing) -> list[str]:
    return [f"{way.packs:,}", f"{1 - way.fill:.3%}", f"{way.documents:,.1f}", f"{way.cost:.3f}", f"{way.balanced:.3f}"]


def _about(plan: PackingPlan) -> str:
    cut = f", {plan.cut:,} of them longer than a pack" if plan.cut else ""
    return f"{counted(plan.documents, 'document')} of {plan.tokens:,} tokens{cut}, packs of {plan.capacity:,} tokens"


def _notes(plan: PackingPlan) -> list[str]:
    notes = [
        "padding: share of padding tokens",
        f"cost: attention cost of the most expensive rank / mean; batches of {counted(plan.batch, 'pack')} per rank. "
        "balanced: with balance=",
    ]
    if plan.looked_at < plan.documents:
        notes.append(f"all ways except the last one used only {plan.looked_at:,} of the documents")
    return notes


def _print(plan: PackingPlan) -> None:
    from rich import box
    from rich.table import Table

    console().print(_about(plan))
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("", style="bold", no_wrap=True)
    for name in _headings(plan):
        table.add_column(name, justify="right")
    for way in plan.ways:
        table.add_row(way.name, *_cells(way))
    print_figures(table)
    for note in _notes(plan):
        console().print(note)


def _draw(path: Path, plan: PackingPlan) -> None:
    """Draw padding, documents per pack and costs into a file; its extension is the format."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    waste, documents, costs = figure.subplots(1, 3, sharey=True)
    names = [way.name for way in plan.ways]
    places = range(len(names))
    bars = waste.barh(places, [100 * (1 - way.fill) for way in plan.ways])
    waste.bar_label(bars, [f"{1 - way.fill:.2%}" for way in plan.ways], padding=3, fontsize=8)
    waste.set(yticks=places, yticklabels=names, xlabel="%", xlim=(0, 100), title="padding")
    waste.invert_yaxis()
    documents.bar_label(documents.barh(places, [way.documents for way in plan.ways]), fmt="%.1f", padding=3, fontsize=8)
    documents.set(title="documents per pack")
    costs.barh([place - 0.2 for place in places], [way.cost for way in plan.ways], 0.4, label="in order")
    costs.barh([place + 0.2 for place in places], [way.balanced for way in plan.ways], 0.4, label="balanced")
    costs.set(title=f"cost of the most expensive of {plan.ranks} ranks / mean", xlim=(0.9, None))
    costs.legend(fontsize=8)
    figure.suptitle(_about(plan), fontsize=11)
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot draw into {str(path)!r}: {error}") from error


def _page(plan: PackingPlan) -> str:
    """Return a self-contained HTML page."""
    table = html_table(["", *_headings(plan)], [[way.name, *_cells(way)] for way in plan.ways])
    names = [way.name for way in plan.ways]
    plots = [
        _bars("Padding", names, [1 - way.fill for way in plan.ways], "{:.2%}"),
        _bars("Documents per pack", names, [way.documents for way in plan.ways], "{:,.1f}"),
        _bars(
            f"Cost of the most expensive of {plan.ranks} ranks / mean; pale: balanced",
            names,
            [way.cost - 1 for way in plan.ways],
            "+{:.1%}",
            [way.balanced - 1 for way in plan.ways],
        ),
    ]
    return plan_page("Packing", _about(plan), [table, *plots], _notes(plan))


def _bars(title: str, names: Sequence[str], values: Sequence[float], form: str, pale: Sequence[float] = ()) -> str:
    """Return an SVG with a bar for each name, and a pale one below it."""
    high = max(*values, *pale, 1e-9)
    step = 44 if pale else 28
    parts = []
    for number, (name, value) in enumerate(zip(names, values, strict=True)):
        top = step * number
        parts.append(f'<text x="150" y="{top + 15}" text-anchor="end">{escape(name)}</text>')
        for kind, found, y in [("bar", value, top + 2), *([("pale", pale[number], top + 20)] if pale else [])]:
            wide = round(max(1.0, 560 * found / high), 1)
            parts.append(f'<rect class="{kind}" x="160" y="{y}" width="{wide}" height="16"/>')
            parts.append(f'<text x="{166 + wide}" y="{y + 13}">{form.format(found)}</text>')
    drawn = "".join(parts)
    return (
        f'<h2>{escape(title)}</h2><svg viewBox="0 0 860 {step * len(names)}" role="img" aria-label="{escape(title)}">'
        f"{drawn}</svg>"
    )
