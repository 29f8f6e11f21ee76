"""The status page of a server: datasets, clients and throughput, as HTML with an SVG plot per quantity, without files.

`body` is the part that changes; the page fetches it every two seconds, and shows when no answer arrives. Without
scripts, the browser reloads the page every five seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from string import Template

from penstock.html_page import html_page
from penstock.server.metrics import Served
from penstock.server.plot import area, short
from penstock.server.traffic import Counts, History, Snapshot

__all__ = ["body", "page"]

_HOSTS = 50  # clients shown

_STYLE = """
h2 { font-size: 13px; font-weight: 600; color: var(--soft); margin: 0 0 8px }
code { font: 13px ui-monospace, "DejaVu Sans Mono", monospace }
.bad { color: var(--bad) }
#stale { display: none; color: var(--bad); font-weight: 600 }
.stale #stale { display: inline }
.stale main { opacity: .45 }
.numbers { grid-template-columns: repeat(5, minmax(0, 1fr)) }
.numbers b { font-size: 24px }
.axis { font-size: 12px }
.line { stroke: var(--blue) }
.fill { fill: var(--blue); opacity: .14 }
"""

_BODY = Template(
    """<header><h1>Penstock server</h1><code>$address</code>
<span id="stale" role="status">no answer from it</span></header>
<main>
$body
</main>
<script nonce="$nonce">
async function renew() {
  try {
    if (!document.hidden) {
      const answer = await fetch("body", { signal: AbortSignal.timeout(5000), cache: "no-store" })
      if (!answer.ok) throw new Error(answer.status)
      document.querySelector("main").innerHTML = await answer.text()
      document.body.classList.remove("stale")
    }
  } catch { document.body.classList.add("stale") }
  setTimeout(renew, 2000)
}
setTimeout(renew, 2000)
</script>
"""
)


def page(address: str, now: Snapshot, served: Sequence[Served], *, nonce: str) -> str:
    """Return the whole page; ``nonce`` allows its own style and script, and no others."""
    whole = _BODY.substitute(address=escape(address), nonce=nonce, body=body(now, served))
    reload = '<noscript><meta http-equiv="refresh" content="5"></noscript>\n'
    return html_page(f"Penstock server {address}", _STYLE, whole, head=reload, nonce=nonce)


def body(now: Snapshot, served: Sequence[Served]) -> str:
    """Return the part that changes: numbers, plots, datasets, clients, errors."""
    history = now.history()
    rows = [float(second[0]) for second in history]
    size = [float(second[1]) for second in history]
    last = history[-10:]
    numbers = (
        (short(sum(r for r, _ in last) / len(last)), "rows/s"),
        (_size(sum(b for _, b in last) / len(last)) + "/s", "sent"),
        (f"{now.active:,}", "open streams"),
        (f"{len(now.clients):,}", "clients"),
        (_duration(now.uptime), "up"),
    )
    cells = "".join(f"<div><b>{value}</b><span class='soft'>{name}</span></div>" for value, name in numbers)
    return "\n".join(
        [
            f'<section class="wide numbers">{cells}</section>',
            _plot("Rows per second", rows),
            _plot("Bytes per second", size),
            _datasets(now, served),
            _clients(now),
            _errors(now),
        ]
    )


def _plot(title: str, values: Sequence[float]) -> str:
    return f"<section><h2>{title}</h2>{area(values, title=title.lower(), seconds=History.SECONDS)}</section>"


def _datasets(now: Snapshot, served: Sequence[Served]) -> str:
    head = ("dataset", "rows", "fingerprint", "rows/s", "bytes/s", "rows sent", "bytes sent", "open streams", "errors")
    lines = []
    for one in served:
        counts = now.datasets.get(one.name) or _NOTHING
        rate = counts.rate()
        mark = f'<code title="{escape(one.fingerprint)}">{escape(one.fingerprint[:12])}</code>'
        cells = (
            *(escape(one.name), f"{one.rows:,}", mark, short(rate[0]), _size(rate[1])),
            *(short(counts.rows), _size(counts.bytes), f"{counts.active:,}", f"{sum(counts.errors.values()):,}"),
        )
        lines.append(cells)
    return _table("Datasets", head, lines, "wide", empty="none")


def _clients(now: Snapshot) -> str:
    shown = sorted(now.clients, key=lambda client: (-client.active, -client.streams, client.host))[:_HOSTS]
    lines = [(f"<code>{escape(c.host)}</code>", f"{c.streams:,}", f"{c.active:,}") for c in shown]
    if len(now.clients) > _HOSTS:
        lines.append((f"<span class='soft'>and {len(now.clients) - _HOSTS:,} more</span>", "", ""))
    return _table("Clients of the last minute", ("host", "streams", "open"), lines, empty="nobody")


def _errors(now: Snapshot) -> str:
    named = [(name, kind, count) for name, counts in now.datasets.items() for kind, count in counts.errors.items()]
    named += [("", kind, count) for kind, count in now.errors.items()]
    named.sort(key=lambda error: -error[2])
    lines = [
        (
            f"<span class='bad'>{escape(kind)}</span>",
            escape(name) or "<span class='soft'>none named</span>",
            f"{count:,}",
        )
        for name, kind, count in named[:_HOSTS]
    ]
    return _table("Errors", ("kind", "dataset", "requests"), lines, empty="none")


def _table(title: str, head: Sequence[str], lines: Sequence[Sequence[str]], style: str = "", *, empty: str) -> str:
    """Return a table; cells are HTML."""
    if not lines:
        return f'<section class="{style}"><h2>{title}</h2><span class="soft">{empty}</span></section>'
    names = "".join(f"<th>{name}</th>" for name in head)
    rows = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in line) + "</tr>" for line in lines)
    return f'<section class="{style}"><h2>{title}</h2><table><tr>{names}</tr>{rows}</table></section>'


def _size(count: float) -> str:
    text = short(count)
    return f"{text}B" if text[-1].isalpha() else f"{text} B"


def _duration(seconds: float) -> str:
    whole = int(seconds)
    for unit, size, smaller, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // part} {smaller}"
    return f"{whole} s"


_NOTHING = Counts(0, 0, 0, 0, {}, [(0, 0)])
