"""Pictures of results beside the peers, a bar each, as SVG: images a second, and samples a second out of a store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

__all__ = ["images", "stores"]

_LEFT, _BAR, _WIDTH, _TOP, _STEP, _HEIGHT = 190, 440, 760, 64, 26, 18
_STYLE = """\
    svg { color-scheme: light dark; }
    text { font: 14px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #263238; }
    .small { font-size: 12px; fill: #546e7a; }
    .head { font-weight: 600; }
    .end { text-anchor: end; }
    .in { text-anchor: end; fill: #ffffff; }
    .back { fill: #ffffff; }
    .ours { fill: #00796b; }
    .plain { fill: none; stroke: #78909c; stroke-dasharray: 4 3; }
    .peer { fill: #b0bec5; }
    @media (prefers-color-scheme: dark) {
      text { fill: #eceff1; }
      .small { fill: #b0bec5; }
      .back { fill: #1e2129; }
      .ours { fill: #4db6ac; }
      .plain { stroke: #90a4ae; }
      .peer { fill: #546e7a; }
      .in { fill: #1e2129; }
    }
"""


def images(result: dict[str, Any]) -> str:
    """Return bars of the medians of ``images.json``; rows that were not measured are left out."""
    table = result["tables"][0]
    name, rate = table["columns"].index("peer"), table["columns"].index("median")
    rows = [Bar(row[name], _number(row[rate])) for row in table["rows"] if row[rate]]
    return _bars(
        rows,
        result,
        "JPEG files to augmented batches of 224 x 224: images a second",
        "two workers; read, decode, random crop, resize, mirror; the dashed bar only reads and decodes",
        "docs/performance.md",
    )


def stores(result: dict[str, Any]) -> str:
    """Return bars of a cold epoch out of the store that is farthest away, of ``remote.json``; failures are left out."""
    tables = [table for table in result["tables"] if table["title"].endswith("before each answer")]
    table = [table for table in tables if any(column.startswith("cold samples") for column in table["columns"])][-1]
    columns = table["columns"]
    # The least of each figure is named, and the median stands behind it.
    first, rate = (
        next(number for number, column in enumerate(columns) if column.startswith(begin)) + 1
        for begin in ("first batch", "cold samples")
    )
    rows = [
        Bar(row[0], _number(row[rate]), f"first batch in {row[first]} s") for row in table["rows"] if row[rate] != "-"
    ]
    return _bars(
        rows,
        result,
        "A first epoch out of a store: samples a second",
        table["title"],
        "docs/guides/training-from-stores.md",
    )


class Bar(NamedTuple):
    """A row of a picture."""

    name: str
    rate: float
    more: str = ""


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def _bars(rows: list[Bar], result: dict[str, Any], title: str, note: str, page: str) -> str:
    rows = sorted(rows, key=lambda row: -row.rate)
    height = _TOP + _STEP * len(rows) + 34
    where = f"{result['machine']['processor']}, {result['machine']['cores']} cores, {result['date'][:10]}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
            f'height="{height}" role="img" aria-labelledby="title desc">',
            f'  <title id="title">{escape(title)}</title>',
            f'  <desc id="desc">{escape(_described(title, rows))}</desc>',
            f"  <style>\n{_STYLE}  </style>",
            f'  <rect class="back" width="{_WIDTH}" height="{height}" rx="8"/>',
            f'  <text x="20" y="30" class="head">{escape(title)}</text>',
            f'  <text x="20" y="50" class="small">{escape(note)}</text>',
            *(line for number, row in enumerate(rows) for line in _bar(number, row, most=rows[0].rate)),
            f'  <text x="20" y="{height - 14}" class="small">{escape(where)}; medians; {page}</text>',
            "</svg>\n",
        ]
    )


def _bar(number: int, bar: Bar, *, most: float) -> list[str]:
    """Return a row: name, bar, number."""
    y, width = _TOP + _STEP * number, round(_BAR * bar.rate / most)
    kind = "plain" if bar.name == "decode alone" else "ours" if bar.name.lower().startswith("penstock") else "peer"
    more = f"; {bar.more}" if bar.more else ""
    # Where there is no room behind a bar, its number stands in it.
    inside = bool(more) and width > _BAR // 2
    x, kinds = (_LEFT + width - 8, "small in") if inside else (_LEFT + width + 8, "small")
    return [
        f'  <text x="{_LEFT - 10}" y="{y + 14}" class="end">{escape(bar.name)}</text>',
        f'  <rect class="{kind}" x="{_LEFT}" y="{y}" width="{width}" height="{_HEIGHT}" rx="2"/>',
        f'  <text x="{x}" y="{y + 14}" class="{kinds}">{bar.rate:,.0f}{escape(more)}</text>',
    ]


def _described(title: str, rows: Sequence[Bar]) -> str:
    return f"{title}: " + ", ".join(f"{row.name} {row.rate:,.0f}" for row in rows) + "."
