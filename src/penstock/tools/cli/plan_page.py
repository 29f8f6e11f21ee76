"""The HTML pages of ``penstock plan --html``: self-contained tables and plots."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from penstock.errors import ConfigError
from penstock.html_page import html_page

__all__ = ["check_page", "html_table", "plan_page"]

_STYLE = """
body { max-width: 960px }
h2 { font-size: 14px; margin: 20px 0 4px }
p { color: var(--soft); margin: 0 0 6px }
th, td { white-space: normal }
svg { display: block; width: 100%; height: auto }
text { fill: var(--ink); font-size: 13px } .bar { fill: var(--blue) } .pale { fill: var(--pale) }
.s0 { fill: #1f6fc4 } .s1 { fill: #d9822b } .s2 { fill: #2f9e58 } .s3 { fill: #8a5fc7 }
.s4 { fill: #c9485b } .s5 { fill: #2aa1a8 } .s6 { fill: #9a7b2f } .s7 { fill: #7d7d86 }
"""


def check_page(path: Path | None) -> None:
    """Check, before planning, that the page can be written.

    Raises:
        ConfigError: its folder does not exist.
    """
    if path is not None and not path.parent.is_dir():
        raise ConfigError(f"cannot write {str(path)!r}: the folder {str(path.parent)!r} does not exist")


def html_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an HTML table."""
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def plan_page(title: str, about: str, body: Sequence[str], notes: Sequence[str]) -> str:
    """Return an HTML page: title, a line about the plan, the elements of the body, and notes."""
    said = [f"<p>{escape(note)}</p>" for note in notes]
    parts = [f"<h1>{escape(title)}</h1>", f"<p>{escape(about)}</p>", *body, *said]
    return html_page(f"Penstock: {title}", _STYLE, "\n".join(parts))
