"""Folders on the command line: what `penstock profile` takes, other commands take too, or say which one does."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import penstock as ps
from penstock.errors import ConfigError
from penstock.tools.cli.app import app

COMMANDS = ("shards info", "manifest info", "shuffle-quality")
KINDS = ("images", "shards", "compressed", "tables", "arrays", "mds", "nothing")


def report(command: str, source: Path, *options: object) -> dict[str, Any]:
    result = CliRunner().invoke(app, [*command.split(), str(source), "--json", *map(str, options)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder of each kind, of 24 samples."""
    where = tmp_path_factory.mktemp("folders")
    for kind in KINDS:
        (where / kind).mkdir()
    picture = cv2.imencode(".png", np.zeros((4, 4, 3), np.uint8))[1].tobytes()
    for name in ("cat", "dog"):
        (where / "images" / name).mkdir()
        for number in range(12):
            (where / "images" / name / f"{number}.png").write_bytes(picture)
    for number in range(24):
        np.save(where / "arrays" / f"{number}.npy", np.zeros(3))
    for path, mode in (("shards/0.tar", "w"), ("compressed/0.tar.gz", "w:gz")):
        with tarfile.open(where / path, mode) as archive:
            for number in range(24):
                info = tarfile.TarInfo(f"{number:03d}.txt")
                info.size = 3
                archive.addfile(info, io.BytesIO(b"abc"))
    pq.write_table(pa.table({"x": range(24)}), where / "tables" / "train.parquet")
    (where / "mds" / "index.json").write_text(json.dumps({"version": 2, "shards": []}))
    return where


def test_shards_of_a_folder(folders: Path) -> None:
    found = report("shards info", folders / "shards")
    assert (found["shards"], found["samples"]) == (1, 24)
    assert found["fingerprint"] == ps.ShardSet(folders / "shards" / "0.tar").fingerprint
    assert CliRunner().invoke(app, ["shards", "verify", str(folders / "shards")]).exit_code == 0


def test_a_manifest_of_a_folder(folders: Path) -> None:
    found = report("manifest info", folders / "images")
    assert (found["rows"], found["labels"]["classes"], found["root"]) == (24, 2, str(folders / "images"))
    assert found["fingerprint"] == ps.open(folders / "images").manifest.fingerprint
    arrays = report("manifest info", folders / "arrays")
    assert (arrays["rows"], list(arrays["columns"])) == (24, ["path"])
    with pytest.raises(ConfigError, match=r"images: .* leave --root out"):
        report("manifest info", folders / "images", "--root", "/")


@pytest.mark.parametrize("kind", ["images", "shards", "tables", "arrays"])
def test_orders_of_a_folder(folders: Path, kind: str) -> None:
    found = report("shuffle-quality", folders / kind, "--batch-size", 4)
    assert found["rows"] == 24
    assert found["fingerprint"]
    first, *_ = found["orders"]
    assert first["order"] == "none"
    classes = first["classes"]
    assert (classes == 1) if kind == "images" else (classes is None)


@pytest.mark.parametrize(
    ("command", "kind", "other"),
    [
        ("shards info", "images", "penstock manifest info"),
        ("shards info", "arrays", "penstock manifest info"),
        ("shards info", "tables", "penstock profile"),
        ("shards info", "compressed", "penstock profile"),
        ("shards info", "mds", "penstock profile"),
        ("manifest info", "shards", "penstock shards info"),
        ("manifest info", "tables", "penstock profile"),
        ("manifest info", "compressed", "penstock profile"),
        ("manifest info", "mds", "penstock profile"),
        ("shuffle-quality", "compressed", "unpack them first"),
    ],
)
def test_what_a_command_does_not_tell_another_one_does(folders: Path, command: str, kind: str, other: str) -> None:
    with pytest.raises(ConfigError, match=other):
        report(command, folders / kind)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_of_nothing(folders: Path, command: str) -> None:
    with pytest.raises(ConfigError, match=r"an empty folder\. `open` needs"):
        report(command, folders / "nothing")
