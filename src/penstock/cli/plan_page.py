"""The pages that ``penstock plan`` writes with ``--html``: tables and plots that need nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template

from penstock.errors import ConfigError

__all__ = ["check_page", "html_page", "html_table"]

_PAGE = Template(
    """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Penstock: $title</title>
<style>
:root { --page: #f7f7f5; --ink: #16161a; --soft: #5c5c63; --line: #e2e2de; --bar: #1f6fc4; --pale: #a9c8ea }
@media (prefers-color-scheme: dark) {
  :root { --page: #121214; --ink: #f1f1f3; --soft: #a5a5ad; --line: #323238; --bar: #5aa2ef; --pale: #2c5380 }
}
body { margin: 0 auto; padding: 24px 20px; max-width: 960px; background: var(--page); color: var(--ink);
  font: 15px/1.45 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; font-variant-numeric: tabular-nums }
h1 { font-size: 20px } h2 { font-size: 14px; margin: 20px 0 4px }
p { color: var(--soft); margin: 0 0 6px }
table { border-collapse: collapse; width: 100% }
th, td { text-align: right; padding: 5px 0 5px 18px; border-top: 1px solid var(--line) }
th { font-weight: 500; color: var(--soft); border-top: 0 }
th:first-child, td:first-child { text-align: left; padding-left: 0 }
svg { display: block; width: 100%; height: auto }
text { fill: var(--ink); font-size: 13px } .bar { fill: var(--bar) } .pale { fill: var(--pale) }
.axis { fill: var(--soft) } .s0 { fill: #1f6fc4 } .s1 { fill: #d9822b } .s2 { fill: #2f9e58 } .s3 { fill: #8a5fc7 }
.s4 { fill: #c9485b } .s5 { fill: #2aa1a8 } .s6 { fill: #9a7b2f } .s7 { fill: #7d7d86 }
</style>
</head>
<body>
<h1>$title</h1>
<p>$about</p>
$body
$notes
</body>
</html>
"""
)


def check_page(path: Path | None) -> None:
    """Say before anything is planned that there will be no page.

    Raises:
        ConfigError: there is no such folder.
    """
    if path is not None and not path.parent.is_dir():
        raise ConfigError(f"cannot write {str(path)!r}: there is no folder {str(path.parent)!r}")


def html_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of texts."""
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def html_page(title: str, about: str, body: Sequence[str], notes: Sequence[str]) -> str:
    """Return a page with one line about it, parts in HTML, and notes."""
    said = "".join(f"<p>{escape(note)}</p>" for note in notes)
    return _PAGE.substitute(title=escape(title), about=escape(about), body="\n".join(body), notes=said)
