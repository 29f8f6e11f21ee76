"""Names of smaller projects are in `penstock.compat`, the same as in `penstock`, and in no guide but that of moving."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import penstock
from penstock import compat

ROOT = Path(__file__).resolve().parents[2]
MOVING = {
    *("reference/compat.md", "migrating.md", "guides/dpex.md", "architecture.md", "performance.md"),
    "quickstart/rank-dataset-dpex.md",
}


@pytest.mark.parametrize("name", compat.__all__)
def test_a_name_is_that_of_penstock(name: str) -> None:
    assert getattr(compat, name) is getattr(penstock, name)
    assert name in dir(compat)


def test_other_names_are_refused() -> None:
    with pytest.raises(AttributeError, match=r"module 'penstock\.compat' has no attribute 'nothing'"):
        compat.nothing  # noqa: B018


def test_guides_lead_with_other_names() -> None:
    names = re.compile(rf"\b({'|'.join(compat.__all__)})\b")
    docs = ROOT / "docs"
    pages = {str(path.relative_to(docs)) for path in docs.rglob("*.md") if names.search(path.read_text("utf-8"))}
    assert pages <= MOVING
