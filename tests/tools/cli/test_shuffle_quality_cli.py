"""``penstock shuffle-quality`` on real manifests: what it says is what the manifest and its order are."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path

import numpy as np
import pytest
from cli_support import said
from typer.testing import CliRunner

from penstock.errors import ConfigError, ManifestError
from penstock.manifest import Manifest
from penstock.order import make_order
from penstock.tools.cli.app import app

invoke = functools.partial(said, "shuffle-quality")


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    """6,000 rows of 30 classes, sorted by class."""
    path = tmp_path / "train.txt"
    path.write_text("".join(f"{row}.jpg {row // 200}\n" for row in range(6000)))
    return path


def test_no_figure_is_cut_on_a_terminal_of_80_columns(manifest: Path) -> None:
    terminal = {"COLUMNS": "80", "FORCE_COLOR": "1", "NO_COLOR": "1", "TERM": "xterm"}
    result = CliRunner().invoke(app, ["shuffle-quality", str(manifest), "--buffer", "1000"], env=terminal)
    assert "…" not in result.stdout
    assert re.search(r"0\.3\d{3}.*3,000", result.stdout)


def test_json_is_what_the_order_is(manifest: Path) -> None:
    options = ("--batch-size", 60, "--ranks", 4, "--seed", 3, "--block-size", 50, "--window", 8)
    report = json.loads(invoke(manifest, "--json", "--buffer", 100, *options))
    assert report["rows"] == 6000
    assert report["fingerprint"] == Manifest.open(manifest).fingerprint
    orders = {entry.pop("order"): entry for entry in report["orders"]}
    assert list(orders) == ["none", "block, 50 x 8", "global", "buffer of 100 (peer)"]
    assert all(entry["batches"] == 100 for entry in orders.values())  # all there are: 4 ranks of 25
    both = np.array([make_order("global", 6000, seed=3, epoch=epoch)[np.arange(6000)] for epoch in range(2)])
    assert orders["global"]["displacement"] == pytest.approx(np.abs(both - np.arange(6000)).mean() / 6000)
    labels = both // 200
    counts = [
        len(set(epoch[rank::4][k : k + 60].tolist()))
        for epoch in labels
        for rank in range(4)
        for k in range(0, 1500, 60)
    ]
    assert orders["global"]["classes"] == pytest.approx(np.mean(counts))
    assert (
        orders["none"]["classes"] < 2.3 < orders["buffer of 100 (peer)"]["classes"] < orders["block, 50 x 8"]["classes"]
    )
    assert orders["none"]["pairs_again"] == 1 > orders["buffer of 100 (peer)"]["pairs_again"]
    assert orders["block, 50 x 8"]["runs"] < orders["global"]["runs"]
    assert orders["buffer of 100 (peer)"]["window"] == 6000


def test_the_table(manifest: Path) -> None:
    text = re.sub(r"[ \t]+", " ", invoke(manifest, "--batch-size", 60, "--kind", "global", "--kind", "torch"))
    assert "6,000 rows, 60 in a batch, 100 batches measured in each epoch" in text
    assert re.search(r" order displacement classes per batch 5th percentile repeated pairs overlap window ", text)
    assert re.search(r" global 0\.3\d+ 2\d\.\d 2\d ", text)
    assert re.search(r" torch 0\.3\d+ 2\d\.\d 2\d ", text)
    assert "streams" not in text
    text = invoke(manifest, "--batch-size", 60, "--kind", "global", "--buffer", 100)
    assert [line.split()[0] for line in text.splitlines() if "streams" in line] == ["buffer"]
    assert re.search(r" expected at random 0\.3333 2\d\.\d ", text)
    assert "none" not in text


def test_labels_of_other_types(tmp_path: Path) -> None:
    path = tmp_path / "names.txt"
    path.write_text("".join(f"{row}.jpg {'cat' if row < 500 else 'dog'}\n" for row in range(1000)))
    report = json.loads(invoke(path, "--json", "--label", "str", "--batch-size", 10))
    assert {entry["order"]: entry["classes"] for entry in report["orders"]}["none"] == 1
    text = invoke(path, "--label", "none", "--batch-size", 10)
    assert "no classes" in text
    assert "classes per batch" not in text
    with pytest.raises(ManifestError, match="not an integer"):
        invoke(path, "--batch-size", 10)


def test_one_epoch_has_no_repeats(manifest: Path) -> None:
    assert "repeated pairs" not in invoke(manifest, "--epochs", 1)
    report = json.loads(invoke(manifest, "--epochs", 1, "--json"))
    assert all(entry["pairs_again"] is None for entry in report["orders"])


def test_what_makes_no_sense(manifest: Path) -> None:
    assert CliRunner().invoke(app, ["shuffle-quality", str(manifest), "--kind", "random"]).exit_code == 2
    with pytest.raises(ConfigError, match="smaller batches or fewer ranks"):
        invoke(manifest, "--ranks", 100)
    assert CliRunner().invoke(app, ["shuffle-quality", str(manifest), "--buffer", "0"]).exit_code == 2


def test_orders_by_node_stand_beside_the_others(tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    path.write_text("".join(f"{row}.jpg {row % 30}\n" for row in range(19_200)))
    options = ("--batch-size", 60, "--ranks", 4, "--locality", "--block-size", 50, "--window", 8)
    orders = {order["order"]: order for order in json.loads(invoke(path, "--json", *options))["orders"]}
    assert list(orders) == ["none", "block, 50 x 8", "block, 50 x 8, by node", "global", "global, by node"]
    plain, local = orders["global"], orders["global, by node"]
    assert local["classes"] == pytest.approx(plain["classes"], rel=0.1)
    # A rank has a quarter of the rows, the same in each epoch.
    assert 3 * plain["pairs_again"] < local["pairs_again"] < 5 * plain["pairs_again"]
    assert local["displacement"] == pytest.approx(1 / 3, abs=0.02)
