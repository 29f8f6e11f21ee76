"""`html_page`: the frame and style of all HTML pages, light and dark; self-contained, without external files.

A page has a line at the top, cards (``section``) in a grid of two columns (``main``), tables and plots.
"""

from __future__ import annotations

from html import escape
from string import Template

__all__ = ["html_page"]

_PAGE = Template(
    """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
$head<style>
:root { --page: #f7f7f5; --card: #ffffff; --ink: #16161a; --soft: #5c5c63; --line: #e2e2de; --blue: #1f6fc4;
  --pale: #a9c8ea; --bad: #b3261e }
@media (prefers-color-scheme: dark) {
  :root { --page: #121214; --card: #1c1c1f; --ink: #f1f1f3; --soft: #a5a5ad; --line: #323238; --blue: #5aa2ef;
    --pale: #2c5380; --bad: #ff8a80 }
}
* { box-sizing: border-box }
body { margin: 0 auto; padding: 24px 20px 40px; max-width: 1120px; background: var(--page); color: var(--ink);
  font: 15px/1.45 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; font-variant-numeric: tabular-nums }
header { display: flex; flex-wrap: wrap; gap: 4px 16px; align-items: baseline; margin-bottom: 16px }
h1 { font-size: 20px; margin: 0; overflow-wrap: anywhere }
.soft { color: var(--soft) }
main { display: grid; gap: 14px; align-items: start; grid-template-columns: repeat(2, minmax(0, 1fr)) }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 14px 16px; min-width: 0 }
.wide { grid-column: 1 / -1; overflow-x: auto }
.numbers { display: grid; grid-template-columns: repeat(4, minmax(0, 1fr)); gap: 12px }
.numbers b { display: block; font-size: 22px; font-weight: 600; line-height: 1.2; overflow-wrap: anywhere }
table { border-collapse: collapse; width: 100% }
th, td { text-align: right; padding: 5px 0 5px 18px; border-top: 1px solid var(--line); white-space: nowrap }
th { font-size: 13px; font-weight: 500; color: var(--soft); border-top: 0 }
th:first-child, td:first-child { text-align: left; padding-left: 0 }
.plot { display: block; width: 100%; height: auto }
.grid { stroke: var(--line); stroke-width: 1 }
.axis { fill: var(--soft); font-size: 13px }
.line { fill: none; stroke-width: 2; stroke-linejoin: round }
$style
@media (max-width: 760px) {
  main { grid-template-columns: minmax(0, 1fr) }
  .numbers { grid-template-columns: repeat(2, minmax(0, 1fr)) }
}
</style>
</head>
<body>
$body
</body>
</html>
"""
)


def html_page(title: str, style: str, body: str, *, head: str = "") -> str:
    """Return a whole HTML page.

    Args:
        title: the title of the browser window, as text.
        style: CSS rules of this page, after the common ones.
        body: HTML.
        head: more HTML lines for the head, each ending with a line feed.
    """
    return _PAGE.substitute(title=escape(title), style=style.strip(), body=body.strip(), head=head)
