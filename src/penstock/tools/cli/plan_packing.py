"""``penstock plan --packing``: what packs of documents waste, as a table, as a picture, as a page."""

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

_RANKS = 8  # where nobody says: a rank that is alone waits for nobody
_PACKS = 8


def print_packing(
    given: PackingOptions, ranks: int | None, others: list[str], plot: Path | None, *, as_json: bool
) -> None:
    """Print what packs waste, and draw it where that is asked for.

    Args:
        given: what is packed.
        ranks: None for the usual number.
        others: options that the command line has and packs do not ask for.
        plot: a file for a picture.
        as_json: print one JSON object.

    Raises:
        BadParameter: options of a job's plan, which is another one.
        ConfigError: a picture or page that cannot be written.
    """
    from penstock.tools.planning import packing_plan

    if others:
        raise typer.BadParameter(
            f"--packing compares packs alone: leave out {', '.join(others)}, or plan the job apart"
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
    return ["packs", "waste", "documents a pack", f"cost of {plan.ranks} ranks", "dealt by cost"]


def _cells(way: Packing) -> list[str]:
    return [f"{way.packs:,}", f"{1 - way.fill:.3%}", f"{way.documents:,.1f}", f"{way.cost:.3f}", f"{way.balanced:.3f}"]


def _about(plan: PackingPlan) -> str:
    cut = f", {plan.cut:,} of them longer than a pack" if plan.cut else ""
    return f"{counted(plan.documents, 'document')} of {plan.tokens:,} tokens{cut}, packs of {plan.capacity:,} tokens"


def _notes(plan: PackingPlan) -> list[str]:
    notes = [
        "waste: the part of all positions that is padding",
        f"cost: of attention on the dearest rank, over the mean; batches of {counted(plan.batch, 'pack')} a rank. "
        "Dealt by cost: with balance=",
    ]
    if plan.looked_at < plan.documents:
        notes.append(f"all ways but the last one were carried out on {plan.looked_at:,} of the documents")
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
    """Draw waste, documents a pack and costs into a file, of the type that its name ends with."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    waste, documents, costs = figure.subplots(1, 3, sharey=True)
    names = [way.name for way in plan.ways]
    places = range(len(names))
    bars = waste.barh(places, [100 * (1 - way.fill) for way in plan.ways])
    waste.bar_label(bars, [f"{1 - way.fill:.2%}" for way in plan.ways], padding=3, fontsize=8)
    waste.set(yticks=places, yticklabels=names, xlabel="%", xlim=(0, 100), title="waste")
    waste.invert_yaxis()
    documents.bar_label(documents.barh(places, [way.documents for way in plan.ways]), fmt="%.1f", padding=3, fontsize=8)
    documents.set(title="documents a pack")
    costs.barh([place - 0.2 for place in places], [way.cost for way in plan.ways], 0.4, label="as they come")
    costs.barh([place + 0.2 for place in places], [way.balanced for way in plan.ways], 0.4, label="dealt by cost")
    costs.set(title=f"cost of the dearest of {plan.ranks} ranks / mean", xlim=(0.9, None))
    costs.legend(fontsize=8)
    figure.suptitle(_about(plan), fontsize=11)
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot draw into {str(path)!r}: {error}") from error


def _page(plan: PackingPlan) -> str:
    """Return a page that needs nothing else."""
    table = html_table(["", *_headings(plan)], [[way.name, *_cells(way)] for way in plan.ways])
    names = [way.name for way in plan.ways]
    plots = [
        _bars("Waste", names, [1 - way.fill for way in plan.ways], "{:.2%}"),
        _bars("Documents a pack", names, [way.documents for way in plan.ways], "{:,.1f}"),
        _bars(
            f"Cost of the dearest of {plan.ranks} ranks, over the mean; pale: dealt by cost",
            names,
            [way.cost - 1 for way in plan.ways],
            "+{:.1%}",
            [way.balanced - 1 for way in plan.ways],
        ),
    ]
    return plan_page("Packing", _about(plan), [table, *plots], _notes(plan))


def _bars(title: str, names: Sequence[str], values: Sequence[float], form: str, pale: Sequence[float] = ()) -> str:
    """Return a plot with a bar for each name, and a pale one below it."""
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
