"""Bar charts as SVG that read well on a phone: a name and a figure, with the bar below them.

A picture has one panel or several; each has a scale of its own. It follows the reader's light or dark mode.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple
from xml.sax.saxutils import escape

__all__ = ["Bar", "Panel", "draw"]

# Units of the picture, which a phone shows at nearly their size in pixels.
_WIDTH, _EDGE, _STEP = 420, 16, 31
# What one character takes at most in each size of text, to break lines.
_HEAD_COLUMNS, _ROW_COLUMNS, _SMALL_COLUMNS = 46, 48, 62
_STYLE = """\
    svg { color-scheme: light dark; }
    text { font: 14px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #263238; }
    .small { font-size: 12px; fill: #546e7a; }
    .head { font-size: 15px; font-weight: 600; }
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


class Bar(NamedTuple):
    """One row of a panel. `text` stands in place of the value, where the plain number is not enough."""

    name: str
    value: float
    kind: Literal["ours", "peer", "plain"] = "peer"
    text: str = ""

    @property
    def figure(self) -> str:
        """Return the text at the end of the row."""
        return self.text or f"{self.value:,.0f}"


class Panel(NamedTuple):
    """Bars on one scale, the best first: the largest, or the smallest where ``least`` is better."""

    title: str
    note: str
    bars: Sequence[Bar]
    least: bool = False

    def ordered(self) -> list[Bar]:
        """Return the bars, the best first."""
        return sorted(self.bars, key=lambda bar: bar.value if self.least else -bar.value)


def draw(title: str, panels: Iterable[Panel], source: str) -> str:
    """Return a picture of the panels that have bars; `source` says below where the figures come from."""
    panels = [panel for panel in panels if panel.bars]
    lines: list[str] = []
    y = 4
    for panel in panels:
        drawn, y = _panel(panel, y)
        lines += drawn
    drawn, y = _text(source, y + 4, "small", _SMALL_COLUMNS, 16)
    height = y + 10
    described = ". ".join(_described(panel) for panel in panels)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH * 11 // 10}" '
            f'height="{height * 11 // 10}" role="img" aria-labelledby="title desc">',
            f'  <title id="title">{escape(title)}</title>',
            f'  <desc id="desc">{escape(described)}.</desc>',
            f"  <style>\n{_STYLE}  </style>",
            f'  <rect class="back" width="{_WIDTH}" height="{height}" rx="8"/>',
            *lines,
            *drawn,
            "</svg>\n",
        ]
    )


def _panel(panel: Panel, y: int) -> tuple[list[str], int]:
    """Return the lines of a panel that begins at this height, and the height below it."""
    lines, y = _text(panel.title, y + 8, "head", _HEAD_COLUMNS, 20)
    note, y = _text(panel.note, y, "small", _SMALL_COLUMNS, 16)
    y += 4
    most = max(bar.value for bar in panel.bars) or 1.0
    for bar in panel.ordered():
        width = max(2, round((_WIDTH - 2 * _EDGE) * bar.value / most))
        kind = "end small" if len(bar.name) + len(bar.figure) > _ROW_COLUMNS else "end"
        note += [
            f'  <text x="{_EDGE}" y="{y + 19}">{escape(bar.name)}</text>',
            f'  <text x="{_WIDTH - _EDGE}" y="{y + 19}" class="{kind}">{escape(bar.figure)}</text>',
            f'  <rect class="{bar.kind}" x="{_EDGE}" y="{y + 24}" width="{width}" height="7" rx="2"/>',
        ]
        y += _STEP
    return lines + note, y + 8


def _text(text: str, y: int, kind: str, columns: int, step: int) -> tuple[list[str], int]:
    """Return a text in as many lines as it needs, and the height below it."""
    lines = textwrap.wrap(text, columns)
    drawn = [
        f'  <text x="{_EDGE}" y="{y + step * number}" class="{kind}">{escape(line)}</text>'
        for number, line in enumerate(lines, 1)
    ]
    return drawn, y + step * len(lines)


def _described(panel: Panel) -> str:
    return f"{panel.title}: " + ", ".join(f"{bar.name} {bar.figure}" for bar in panel.ordered())
