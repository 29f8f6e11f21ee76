"""The picture of the first page: images a second beside the peers, a bar each, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from xml.sax.saxutils import escape

__all__ = ["picture"]

_LEFT, _BAR, _WIDTH, _TOP, _STEP, _HEIGHT = 190, 440, 760, 64, 26, 18
_STYLE = """\
    svg { color-scheme: light dark; }
    text { font: 14px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #263238; }
    .small { font-size: 12px; fill: #546e7a; }
    .head { font-weight: 600; }
    .end { text-anchor: end; }
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
    }
"""


def picture(result: dict[str, Any]) -> str:
    """Bars of the medians of ``images.json``; rows that were not measured are left out."""
    table = result["tables"][0]
    name, rate = table["columns"].index("peer"), table["columns"].index("median")
    rows = [(row[name], float(row[rate].replace(",", ""))) for row in table["rows"] if row[rate]]
    rows.sort(key=lambda row: -row[1])
    height = _TOP + _STEP * len(rows) + 34
    where = f"{result['machine']['processor']}, {result['machine']['cores']} cores, {result['date'][:10]}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
            f'height="{height}" role="img" aria-labelledby="title desc">',
            '  <title id="title">Images a second, beside the peers</title>',
            f'  <desc id="desc">{escape(_described(rows))}</desc>',
            f"  <style>\n{_STYLE}  </style>",
            f'  <rect class="back" width="{_WIDTH}" height="{height}" rx="8"/>',
            '  <text x="20" y="30" class="head">JPEG files to augmented batches of 224 x 224: images a second</text>',
            '  <text x="20" y="50" class="small">two workers; read, decode, random crop, resize, mirror; '
            "the dashed bar only reads and decodes</text>",
            *(line for number, row in enumerate(rows) for line in _bar(number, *row, most=rows[0][1])),
            f'  <text x="20" y="{height - 14}" class="small">{escape(where)}; medians; docs/performance.md</text>',
            "</svg>\n",
        ]
    )


def _bar(number: int, name: str, rate: float, *, most: float) -> list[str]:
    """A row: name, bar, number."""
    y, width = _TOP + _STEP * number, round(_BAR * rate / most)
    kind = "plain" if name == "decode alone" else "ours" if name.startswith("penstock") else "peer"
    return [
        f'  <text x="{_LEFT - 10}" y="{y + 14}" class="end">{escape(name)}</text>',
        f'  <rect class="{kind}" x="{_LEFT}" y="{y}" width="{width}" height="{_HEIGHT}" rx="2"/>',
        f'  <text x="{_LEFT + width + 8}" y="{y + 14}" class="small">{rate:,.0f}</text>',
    ]


def _described(rows: Sequence[tuple[str, float]]) -> str:
    return "Images a second: " + ", ".join(f"{name} {rate:,.0f}" for name, rate in rows) + "."
