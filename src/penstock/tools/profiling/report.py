"""`report`: a profile as one self-contained HTML page, light and dark, without network, scripts or files."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from penstock.html_page import html_page
from penstock.tools.profiling import plots
from penstock.tools.profiling.result import Profile, Stage, Trial
from penstock.wording import counted, rate_text

__all__ = ["rate", "report", "span"]

_STYLE = """
:root { --orange: #d9730d; --green: #2b8a57; --violet: #7a4fc0 }
@media (prefers-color-scheme: dark) { :root { --orange: #f0964b; --green: #57c08a; --violet: #b08cf0 } }
h2 { font-size: 14px; font-weight: 600; margin: 0 0 2px }
p { margin: 0 0 8px; overflow-wrap: anywhere }
figcaption { color: var(--soft); font-size: 13px; margin-bottom: 6px }
figure { margin: 0 }
.numbers .bad { color: var(--bad) }
.chosen td { font-weight: 600 }
.need { stroke: var(--bad); stroke-width: 1.5; stroke-dasharray: 5 4 }
.inline { stroke: var(--soft); stroke-width: 1.5; stroke-dasharray: 2 3 }
rect.one { fill: var(--pale) } rect.all { fill: var(--blue) }
rect.wait { fill: var(--orange) } rect.train { fill: var(--green) } rect.ready { fill: var(--blue) }
.line.s0 { stroke: var(--blue) } .line.s1 { stroke: var(--green) } .line.s2 { stroke: var(--violet) }
.dot.s0 { fill: var(--blue); stroke: var(--blue) } .dot.s1 { fill: var(--green); stroke: var(--green) }
.dot.s2 { fill: var(--violet); stroke: var(--violet) } .dot.hollow { fill: none; stroke-width: 2 }
.key { white-space: nowrap; margin-left: 8px }
.key i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 4px }
"""


def report(profile: Profile) -> str:
    """Return the HTML page for a profile."""
    about = (
        f"{counted(profile.cores, 'core')}, batches of {profile.batch_size}, "
        f"{counted(profile.samples, 'sample')} measured alone, in {profile.seconds:.0f} s"
    )
    parts = [
        _numbers(profile),
        "<section class='wide'>"
        + "".join(f"<p>{escape(text)}</p>" for text in profile.verdict.sentences)
        + "</section>",
        _plot(
            "Ceilings of the stages",
            "samples/s of each stage alone, cached samples, logarithmic"
            + _keys(("pale", "one core"), ("blue", f"all {profile.cores}" if profile.cores > 1 else "together"))
            + _needed(profile),
            plots.ceilings(profile),
        ),
        _plot(
            "Executors and workers",
            "samples/s; hollow: new samples"
            + _keys(("blue", "processes"), ("green", "one process with threads"), ("violet", "threads"))
            + "; dotted: inline"
            + _needed(profile),
            plots.settings(profile),
        ),
        _plot(
            "Timeline of batches",
            f"the rehearsal: {escape(str(profile.rehearsal.setting))} beside a step of {_step(profile)}",
            plots.timeline(profile.rehearsal),
        ),
        _plot(
            "Waiting over time",
            "milliseconds for each batch" + ("; dashed: the step" if profile.rehearsal.step else ""),
            plots.waiting(profile.rehearsal),
        ),
        _stages(profile),
        _trials(profile),
    ]
    title, body = f"Penstock profile: {profile.name}", "\n".join(parts)
    header = f'<header><h1>{escape(title)}</h1><span class="soft">{escape(about)}</span></header>'
    return html_page(title, _STYLE, f"{header}\n<main>\n{body}\n</main>")


def rate(value: float | None) -> str:
    """Return samples/s as text with three significant digits."""
    if value is None or value == float("inf"):
        return "–"
    return rate_text(value)


def span(seconds: float) -> str:
    """Return a time as text: "3.21 ms"."""
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{seconds / size:,.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def _step(profile: Profile) -> str:
    if not profile.rehearsal.step:
        return "0 ms"
    part = "" if profile.share == 1 else f", {profile.measured} of {profile.batch_size} samples of a batch"
    return span(profile.rehearsal.step) + part


def _numbers(profile: Profile) -> str:
    verdict = profile.verdict
    cells = [
        (escape(verdict.limit), "limits", ""),
        (rate(verdict.rate), "samples/s expected", ""),
        (escape(str(verdict.setting)), "best on this machine", ""),
    ]
    if verdict.waiting is None:
        cells.append((rate(profile.rate_alone()), "samples/s of one thread", ""))
    else:
        kind = "" if verdict.keeps_up else "bad"
        cells.append((span(verdict.waiting) if verdict.waiting else "0 ms", "expected wait per step", kind))
    divs = "".join(
        f"<div><b class='{kind}'>{value}</b><span class='soft'>{text}</span></div>" for value, text, kind in cells
    )
    return f'<section class="wide numbers">{divs}</section>'


def _keys(*keys: tuple[str, str]) -> str:
    return "".join(
        f' <span class="key"><i style="background: var(--{colour})"></i>{text}</span>' for colour, text in keys
    )


def _needed(profile: Profile) -> str:
    return "" if profile.verdict.needed is None else "; dashed: what the step needs"


def _plot(title: str, caption: str, svg: str) -> str:
    return f"<section><figure><h2>{title}</h2><figcaption>{caption}</figcaption>{svg}</figure></section>"


def _stages(profile: Profile) -> str:
    head = ("stage", "a sample, new", "cached", "waiting", "one core", f"all {profile.cores}", "new, all")

    def row(stage: Stage) -> tuple[str, ...]:
        return (
            *(escape(stage.name), span(stage.first), span(stage.again), f"{stage.waits:.0%}"),
            *(rate(stage.ceiling()), rate(stage.ceiling(profile.cores))),
            rate(stage.ceiling(profile.cores, cached=False)),
        )

    return _table(
        "Each stage alone, in one thread; ceilings in samples/s", head, [row(stage) for stage in profile.stages]
    )


def _trials(profile: Profile) -> str:
    head = ("setting", "samples", "samples/s", "batches", "first batch after", "arguments")

    def row(trial: Trial) -> tuple[str, ...]:
        what = "cached" if trial.cached else "new"
        if trial.error:
            return (escape(str(trial.setting)), what, "–", "–", "–", escape(trial.error[:60]))
        return (
            *(escape(str(trial.setting)), what, rate(trial.rate), f"{trial.batches:,}", span(trial.start)),
            f"<code>{escape(trial.setting.arguments)}</code>",
        )

    chosen = [trial.setting == profile.verdict.setting for trial in profile.trials]
    return _table("Executors and workers at full speed", head, [row(t) for t in profile.trials], chosen)


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], chosen: Sequence[bool] = ()) -> str:
    lines = []
    for number, row in enumerate(rows):
        mark = ' class="chosen"' if number < len(chosen) and chosen[number] else ""
        lines.append(f"<tr{mark}>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>")
    top = "".join(f"<th>{text}</th>" for text in head)
    return f'<section class="wide"><h2>{title}</h2><table><tr>{top}</tr>{"".join(lines)}</table></section>'
