"""``penstock shards ... --json``: what programs read of shards."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.tools.cli.app import app


def write_shard(path: Path, first: int, count: int) -> None:
    with tarfile.open(path, "w") as archive:
        for number in range(first, first + count):
            files = {f"{number:03d}.txt": b"text %d" % number, f"{number:03d}.cls": b"%d" % number}
            for name, data in files.items() if number else list(files.items())[:1]:  # the first one has no class
                info = tarfile.TarInfo(name)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two shards of five and three samples, in the working folder."""
    write_shard(tmp_path / "a-0.tar", 0, 5)
    write_shard(tmp_path / "a-1.tar", 5, 3)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lines(*arguments: str, code: int = 0) -> list[dict[str, Any]]:
    result = CliRunner().invoke(app, ["shards", *arguments, "--json"])
    assert result.exit_code == code, (result.output, result.exception)
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_index(folder: Path) -> None:
    (report,) = lines("index", "a-{0..1}.tar", "--out", "indexes")
    assert report.pop("seconds") > 0
    size = sum((folder / name).stat().st_size for name in ("a-0.tar", "a-1.tar"))
    expected = {"shards": 2, "samples": 8, "indexed": 2, "bytes": size, "out": "indexes", "indexed_images": None}
    assert report == {**expected, "written_to_store": 0}
    assert len(list((folder / "indexes").iterdir())) == 2
    (again,) = lines("index", "a-{0..1}.tar")
    assert (again["indexed"], again["bytes"], again["out"]) == (0, 0, None)
    assert lines("index", "a-{0..1}.tar", "--force")[0]["indexed"] == 2


def test_info(folder: Path) -> None:
    (report,) = lines("info", "a-{0..1}.tar")
    assert (report["shards"], report["samples"], report["fewest"], report["most"]) == (2, 8, 3, 5)
    assert report["bytes"] == sum(path.stat().st_size for path in folder.glob("*.tar"))
    assert report["parts"] == {"txt": {"files": 8, "bytes": 8 * 6}, "cls": {"files": 7, "bytes": 7}}
    assert len(report["fingerprint"]) > 8


def test_where_things_are(folder: Path) -> None:
    samples = lines("ls", "a-{0..1}.tar")
    assert [sample["key"] for sample in samples] == [f"{number:03d}" for number in range(8)]
    assert [list(sample["parts"]) for sample in samples] == [["txt"], *[["txt", "cls"]] * 7]
    for number, sample in enumerate(samples):
        place = sample["parts"]["txt"]
        data = Path(sample["shard"]).read_bytes()
        assert data[place["offset"] : place["offset"] + place["bytes"]] == b"text %d" % number
    (place,) = lines("cat", "a-{0..1}.tar", "006.cls")
    assert (place["shard"], place["key"], place["extension"]) == ("a-1.tar", "006", "cls")
    assert place["offset"] == samples[6]["parts"]["cls"]["offset"]
    assert (folder / "a-1.tar").read_bytes()[place["offset"] : place["offset"] + place["bytes"]] == b"6"


def test_verify(folder: Path) -> None:
    (report,) = lines("verify", "a-1.tar")
    assert (report["ok"], report["shards"], report["samples"], report["bad_shards"]) == (True, 1, 3, 0)
    (report,) = lines("verify", "a-{0..1}.tar", code=1)
    assert (report["ok"], report["samples"], report["bad_shards"]) == (False, 8, 1)
    assert "a-0.tar: 1 of 5 samples have other parts" in report["problems"][0]
    (folder / "a-1.tar").write_bytes((folder / "a-1.tar").read_bytes()[:1500])
    (report,) = lines("verify", "a-0.tar", "a-1.tar", code=1)
    assert (report["ok"], report["bad_shards"]) == (False, 2)


def test_pack(folder: Path) -> None:
    for number in range(3):
        (folder / f"{number}.bin").write_bytes(b"%d" % number)
    (folder / "train.txt").write_text("".join(f"{number}.bin {number}\n" for number in range(3)))
    (report,) = lines("pack", "train.txt", "packed", "--maxcount", "2")
    assert (report["folder"], report["samples"], report["kept"], len(report["shards"])) == ("packed", 3, 0, 2)
    assert report["bytes"] == sum(path.stat().st_size for path in (folder / "packed").glob("*.tar"))
    (again,) = lines("pack", "train.txt", "packed", "--maxcount", "2")
    assert again["kept"] == 2
