"""The index of decisions has each page once, with its title and date; each page says what, why and instead of what."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "decisions"
ROW = re.compile(r"^\| ([\d, -]+) \| \[(.+)\]\(([\w-]+\.md)\) \|$", re.MULTILINE)


def test_the_index_has_every_page_once() -> None:
    rows = ROW.findall((FOLDER / "index.md").read_text(encoding="utf-8"))
    assert sorted(name for _, _, name in rows) == sorted(
        path.name for path in FOLDER.glob("*.md") if path.stem != "index"
    )
    for dates, title, name in rows:
        text = (FOLDER / name).read_text(encoding="utf-8")
        assert text.startswith(f"# {title}\n\nDecided on {dates.replace(', ', ' and ')}.\n"), name
        assert re.findall(r"^\*\*(\w+)\.\*\*", text, re.MULTILINE) == ["Decision", "Reason", "Alternatives"], name
