"""Pages that say which test shows what name tests that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("reliability.md", "security.md")
NAMED = re.compile(r"tests/[\w/.-]*\w(?:::\w+)?")


def missing(text: str) -> list[str]:
    """What is named in a text as ``tests/FILE.py`` or ``tests/FILE.py::test`` and does not exist."""
    problems = []
    for name in dict.fromkeys(NAMED.findall(text)):
        path, _, test = name.partition("::")
        file = ROOT / path
        if not file.is_file() or (test and not re.search(rf"def {test}\(", file.read_text())):
            problems.append(name)
    return problems


@pytest.mark.parametrize("page", PAGES)
def test_named_tests_are_there(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    assert len(NAMED.findall(text)) > 10
    assert missing(text) == []


def test_what_is_not_there_is_found() -> None:
    links = "tests/docs/test_links.py"
    text = f"`{links}`, `tests/docs/none.py`, {links}::test_links_resolve, `tests/docs/x.py::y`, {links}::test_nothing."
    assert missing(text) == [
        "tests/docs/none.py",
        "tests/docs/x.py::y",
        "tests/docs/test_links.py::test_nothing",
    ]
