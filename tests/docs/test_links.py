"""Links between the documents resolve: the file is there, and so is the heading, or the name, behind a `#`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), ROOT / "llms.txt", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
LINK = re.compile(r"\[[^\]\[]*\]\(([^()\s]+)(?:\s+\"[^\"]*\")?\)|<(?:img|a)\s[^>]*?(?:src|href)=\"([^\"]+)\"")
FENCE = re.compile(r"^( *)(```+|~~~+).*?^\1\2\s*$", re.MULTILINE | re.DOTALL)
EXTERNAL = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)


def prose(text: str) -> str:
    """The text without code, in which `[a](b)` is no link."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))


def links(text: str) -> list[str]:
    return [match[1] or match[2] for match in LINK.finditer(prose(text))]


def anchors(text: str) -> set[str]:
    """The anchors that the headings of a document get: lower case, words joined by hyphens, punctuation dropped.

    On pages of the reference each ``::: name`` is an anchor of this name, see `check_site`.
    """
    found = set(re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE))
    for heading in re.findall(r"^#{1,6}\s+(.*?)\s*#*$", FENCE.sub("", text), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        number = 1
        while (name := anchor if number == 1 else f"{anchor}-{number - 1}") in found:
            number += 1
        found.add(name)
    return found


def broken(document: Path) -> list[str]:
    """Every link of `document` that leads nowhere, with the reason."""
    problems = []
    for link in links(document.read_text(encoding="utf-8")):
        if EXTERNAL.match(link):
            continue
        name, _, anchor = link.partition("#")
        target = (document.parent / name) if name else document
        if not target.exists():
            problems.append(f"{link}: no such file")
        elif anchor and target.suffix == ".md" and anchor not in anchors(target.read_text(encoding="utf-8")):
            problems.append(f"{link}: no such heading")
    return problems


@pytest.mark.parametrize("document", DOCUMENTS, ids=[str(path.relative_to(ROOT)) for path in DOCUMENTS])
def test_links_resolve(document: Path) -> None:
    assert broken(document) == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# One heading, `coded` & more\n\n## Twice\n\n## Twice\n\n::: a.Name\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# Top\n[a](other.md) [b](other.md#one-heading-coded--more) [c](#top) [d](other.md#twice-1) [e](https://x.org/y)\n"
        "[l](other.md#a.Name)\n"
        "[f](missing.md) [g](other.md#nowhere) [h](#bottom) ![i](plot.png)\n"
        "`[j](code.md)`\n```python\nx = [k](fenced.md)\n```\n"
    )
    assert broken(page) == [
        "missing.md: no such file",
        "other.md#nowhere: no such heading",
        "#bottom: no such heading",
        "plot.png: no such file",
    ]
