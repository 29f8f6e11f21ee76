"""Numbers with their nouns."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import penstock
from penstock.manifest import Manifest
from penstock.tools.cli.app import app
from penstock.wording import counted, kind_text, with_article


@pytest.mark.parametrize("noun", ["samples", "batches", "copies", "processes", "classes", "rows", "back ends"])
def test_one_and_many(noun: str) -> None:
    one = {"batches": "batch", "copies": "copy", "processes": "process", "classes": "class"}.get(noun, noun[:-1])
    assert [counted(n, one) for n in (0, 1, 2, 1000)] == [f"0 {noun}", f"1 {one}", f"2 {noun}", f"1,000 {noun}"]


@pytest.mark.parametrize(
    ("article", "names"),
    [
        ("an", ["ImageDataset", "ArrayDataset", "MDSDataset", "LMDBThing", "int", "object", "Unpickler", "RNG"]),
        ("a", ["Mixture", "RankDataset", "ShardDataset", "NoneType", "list", "uint8", "UserDict", "URL", "Sampler"]),
    ],
)
def test_articles(article: str, names: list[str]) -> None:
    assert [with_article(name) for name in names] == [f"{article} {name}" for name in names]
    assert kind_text(0) == "an int"


def test_messages_name_types_with_their_article() -> None:
    """Messages take the article from `kind_text`: none has "a ImageDataset"."""
    for path in Path(penstock.__file__).parent.rglob("*.py"):
        assert not re.search(r"\ban? \{type\(", path.read_text("utf-8")), path


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "--samples", "1", "--bytes", "1", "--workers", "1", "--ranks-per-node", "1", "--step-ms", "1"],
        ["manifest", "info", "{list}", "--labels"],
        ["manifest", "check", "{list}"],
        ["manifest", "head", "{list}"],
        ["shuffle-quality", "{list}", "--batch-size", "1", "--epochs", "1", "--batches", "1"],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_reports_of_one(arguments: list[str], tmp_path: object) -> None:
    """None of them says `1 samples`."""
    path = f"{tmp_path}/train.txt"
    with open(path, "w", encoding="utf-8") as file:
        file.write("a.jpg 3\n")
    done = CliRunner().invoke(app, [argument.replace("{list}", path) for argument in arguments])
    assert done.exit_code == 0, done.output
    assert not re.search(r"(?<![\d.,])1 [a-z]+[^s]s\b", done.output), done.output
    assert "<Manifest of 1 row:" in repr(Manifest.open(path))
