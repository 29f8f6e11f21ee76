"""The plots of a report as SVG. The page's style sheet defines their colours.

`ceilings` (stages), `settings` (samples/s by workers), `timeline` (batches of the rehearsal), `waiting` (over time).
CSS classes: ``plot grid axis``, and for the marks ``one all line dot s0 s1 s2 wait train ready need inline``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape

from penstock.svg import short, ticks
from penstock.tools.profiling.result import Moment, Profile, Rehearsal, Trial

__all__ = ["ceilings", "settings", "timeline", "waiting"]

_WIDTH = 540
_LEFT, _RIGHT, _BOTTOM = 58, 14, 26
_NAMES = 92  # width for the names of stages, in pixels
_SHOWN = 48  # number of batches in the timeline
_POINTS = 150
_SERIES = ("process", "auto", "thread")


def ceilings(profile: Profile) -> str:
    """Return two bars for each stage, on one core and on all cores, on a logarithmic scale."""
    rows = [(stage.name, stage.ceiling(), stage.ceiling(profile.cores)) for stage in profile.stages]
    rows.append(("all stages", profile.rate_alone(), max((t.rate for t in profile.trials if t.cached), default=0.0)))
    needed = profile.verdict.needed
    values = [value for row in rows for value in row[1:] if 0 < value < math.inf]
    values += [needed] if needed else []
    low = math.floor(math.log10(min(values))) if values else 0
    high = max(low + 1, math.ceil(math.log10(max(values)))) if values else 1
    scale = (_WIDTH - _NAMES - 64) / (high - low)
    height = 34 * len(rows) + 8

    def x(value: float) -> float:
        place = min(max(value, 10.0**low), 10.0**high) if value > 0 else 10.0**low
        return round(_NAMES + scale * (math.log10(place) - low), 1)

    parts = [_line("grid", x(10.0**power), 0, x(10.0**power), height) for power in range(low, high + 1)]
    parts += [_text(x(10.0**power), height + 18, short(10.0**power), "middle") for power in range(low, high + 1)]
    for number, (name, one, everything) in enumerate(rows):
        top = 34 * number + 6
        parts.append(_text(_NAMES - 8, top + 17, name, "end"))
        for kind, value, y in (("one", one, top), ("all", everything, top + 13)):
            if value < math.inf:
                parts.append(_box(kind, _NAMES, y, max(1.0, x(value) - _NAMES), 11))
                parts.append(_text(x(value) + 5, y + 10, short(value), "start"))
    if needed:
        parts.append(_line("need", x(needed), 0, x(needed), height))
    return _svg(height + _BOTTOM, f"samples/s of each stage, on one core and on all {profile.cores}", parts)


def settings(profile: Profile) -> str:
    """Return samples/s by number of workers, one line per executor; hollow circles mark new samples."""
    shown = [trial for trial in profile.trials if trial.rate > 0 and trial.setting.workers]
    counts = sorted({trial.setting.workers for trial in shown})
    inline = next((trial.rate for trial in profile.trials if not trial.setting.workers), 0.0)
    needed = profile.verdict.needed or 0.0
    marks = ticks(max([trial.rate for trial in shown] + [inline, needed]))
    height, wide = 200, _WIDTH - _LEFT - _RIGHT - 40

    def y(value: float) -> float:
        return round(10 + height * (1 - value / marks[-1]), 1)

    def x(workers: int) -> float:
        return round(_LEFT + 20 + wide * counts.index(workers) / max(1, len(counts) - 1), 1)

    parts = _scale(marks, y)
    parts += [_text(x(count), height + 30, f"{count}", "middle") for count in counts]
    parts.append(_text(_WIDTH / 2, height + 48, "workers", "middle"))
    if inline:
        parts.append(_line("inline", _LEFT, y(inline), _WIDTH - _RIGHT, y(inline)))
    if needed:
        parts.append(_line("need", _LEFT, y(needed), _WIDTH - _RIGHT, y(needed)))
    for number, executor in enumerate(_SERIES):
        parts += _series(f"s{number}", [t for t in shown if t.setting.executor == executor], x, y)
    return _svg(height + 56, "samples/s by executor and number of workers", parts)


def _series(kind: str, trials: Sequence[Trial], x: Callable[[int], float], y: Callable[[float], float]) -> list[str]:
    line = sorted((t.setting.workers, t.rate) for t in trials if t.cached)
    points = " ".join(f"{x(workers)},{y(rate)}" for workers, rate in line)
    parts = [f'<polyline class="line {kind}" points="{points}"/>'] if line else []
    for trial in trials:
        radius, hollow = (4, "") if trial.cached else (5, " hollow")
        parts.append(
            f'<circle class="dot {kind}{hollow}" cx="{x(trial.setting.workers)}" cy="{y(trial.rate)}" r="{radius}"/>'
        )
    return parts


def timeline(rehearsal: Rehearsal) -> str:
    """Return the first batches: when training waited for each, when it used each, and how many were ready."""
    shown = rehearsal.moments[:_SHOWN]
    if not shown:
        return _svg(40, "no batches", [])
    end = rehearsal.moments[len(shown)].asked if len(rehearsal.moments) > len(shown) else shown[-1].had + rehearsal.step
    scale = (_WIDTH - _LEFT - _RIGHT) / max(end, 1e-9)
    marks = ticks(end)
    parts = []
    for mark in marks:
        if mark <= end * 1.001:
            parts.append(_line("grid", _LEFT + scale * mark, 6, _LEFT + scale * mark, 142))
            parts.append(_text(_LEFT + scale * mark, 160, _seconds(mark), "middle"))
    for y, text in ((32, "waiting"), (66, "training"), (116, "ready")):
        parts.append(_text(_LEFT - 8, y, text, "end"))
    for number, moment in enumerate(shown):
        after = shown[number + 1].asked if number + 1 < len(shown) else end
        parts.append(_box("wait", _LEFT + scale * moment.asked, 16, max(0.6, scale * moment.wait), 24))
        parts.append(_box("train", _LEFT + scale * moment.had, 50, max(0.6, scale * (after - moment.had) - 1), 24))
    parts += _ready(shown, scale)
    return _svg(168, f"the first {len(shown)} batches: waiting, training, and ready batches", parts)


def _ready(shown: Sequence[Moment], scale: float) -> list[str]:
    most = max(1, max(moment.ready for moment in shown))
    bars = [
        _box("ready", _LEFT + scale * m.asked, 136 - 46 * m.ready / most, 3, max(0.5, 46 * m.ready / most))
        for m in shown
    ]
    return [*bars, _text(_LEFT - 8, 98, f"{most}", "end")]


def waiting(rehearsal: Rehearsal) -> str:
    """Return the wait for each batch of the rehearsal; with many batches, the longest wait of each group."""
    moments = rehearsal.moments
    size = max(1, math.ceil(len(moments) / _POINTS))
    groups = [moments[at : at + size] for at in range(0, len(moments), size)]
    points = [(group[0].had, 1000 * max(moment.wait for moment in group)) for group in groups]
    end = max((moment.had for moment in moments), default=1.0)
    marks = ticks(max([value for _, value in points] + [1000 * rehearsal.step]))
    height, scale = 150, (_WIDTH - _LEFT - _RIGHT) / max(end, 1e-9)

    def y(value: float) -> float:
        return round(10 + height * (1 - value / marks[-1]), 1)

    parts = _scale(marks, y, " ms")
    parts += [
        _text(_LEFT + scale * mark, height + 30, _seconds(mark), "middle") for mark in ticks(end) if mark <= end * 1.001
    ]
    parts += [_box("wait", _LEFT + scale * at - 1, y(value), 2.4, max(0.6, y(0) - y(value))) for at, value in points]
    if rehearsal.step:
        parts.append(_line("need", _LEFT, y(1000 * rehearsal.step), _WIDTH - _RIGHT, y(1000 * rehearsal.step)))
    return _svg(height + 38, "milliseconds of waiting for each batch, over time", parts)


def _scale(marks: Sequence[float], y: Callable[[float], float], unit: str = "") -> list[str]:
    lines = [_line("grid", _LEFT, y(mark), _WIDTH - _RIGHT, y(mark)) for mark in marks]
    return lines + [_text(_LEFT - 8, y(mark) + 4, short(mark) + unit, "end") for mark in marks]


def _svg(height: float, label: str, parts: Iterable[str]) -> str:
    head = f'<svg class="plot" viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}">'
    return "".join([head, *parts, "</svg>"])


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _box(kind: str, x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text class="axis" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 or not value else f"{1000 * value:.3g} ms"
