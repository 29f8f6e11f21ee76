"""`area`: a small SVG plot of a rate over the last minutes. Colours come from the page's style.

    area([0, 5, 9, 7], title="rows/s", seconds=4)

Classes: ``plot``, ``grid``, ``axis``, ``line``, ``fill``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from penstock.svg import short, ticks

__all__ = ["area", "short", "ticks"]

_WIDTH, _HEIGHT = 540, 190
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 10, 24  # margins around the plot
_POINTS = 150


def area(values: Sequence[float], *, title: str, seconds: int) -> str:
    """Return the plot of ``values``, equally spaced over the last ``seconds``, the oldest first."""
    size = max(1, math.ceil(len(values) / _POINTS))
    points = [sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)]
    marks = ticks(max(points, default=0.0))
    wide, high = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM

    def y(value: float) -> float:
        return round(_TOP + high * (1 - value / marks[-1]), 1)

    step = wide / max(1, len(points) - 1)
    path = " ".join(f"{_LEFT + step * number:.1f},{y(value)}" for number, value in enumerate(points))
    last = short(points[-1]) if points else "0"
    parts = [
        f'<svg class="plot" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img"'
        f' aria-label="{escape(title)} over the last {_ago(seconds)}: now {last}">'
    ]
    for mark in marks:
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(mark)}" y2="{y(mark)}"/>')
        parts.append(f'<text class="axis" x="{_LEFT - 8}" y="{y(mark) + 4}" text-anchor="end">{short(mark)}</text>')
    for part, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        left = seconds * (1 - part)
        text = f"{_ago(left)} ago" if left else "now"
        x = _LEFT + wide * part
        parts.append(f'<text class="axis" x="{x}" y="{_HEIGHT - 6}" text-anchor="{anchor}">{text}</text>')
    if points:
        parts.append(f'<polygon class="fill" points="{_LEFT},{y(0)} {path} {_WIDTH - _RIGHT},{y(0)}"/>')
        parts.append(f'<polyline class="line" points="{path}"/>')
    return "".join([*parts, "</svg>"])


def _ago(seconds: float) -> str:
    return f"{seconds / 60:.3g} min" if seconds >= 60 else f"{seconds:.0f} s"
