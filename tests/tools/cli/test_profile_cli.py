"""``penstock profile``: loaders of programs and paths, tables, JSON, the report, and errors that say what to do."""

from __future__ import annotations

import io
import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from busy_support import HANG
from full_run import full_only
from interpreter_support import run
from typer.testing import CliRunner

from penstock.errors import ConfigError, PenstockError
from penstock.tools.cli.app import app

PROGRAM = """
import time
import torch
import penstock as ps

class Slow(torch.utils.data.Dataset):
    def __len__(self): return 100
    def __getitem__(self, index):
        with ps.stage("read"):
            time.sleep(0.01)
        with ps.stage("decode"):
            return torch.zeros(8)

theirs = torch.utils.data.DataLoader(Slow(), batch_size=4, shuffle=True)
def make(): return ps.DataLoader(Slow(), batch_size=2)
def needs(what): return theirs
class Box:
    loader = theirs
number = 3
def returns_none(): pass
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file `slowly.py` in a folder that is the present one; the path of imports is put back."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slowly.py").write_text(PROGRAM)
    sys.modules.pop("slowly", None)
    return tmp_path / "slowly.py"


@pytest.fixture(autouse=True)
def _brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials may end after a few batches."""
    monkeypatch.setattr("penstock.tools.profiling.measure._SHORTEST", 0.05)


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["profile", *arguments])


def found(*arguments: str) -> dict[str, Any]:
    result = invoke(*arguments, "--seconds", "0.2", "--json")
    assert result.exit_code == 0, (result.output, result.exception)
    parsed: dict[str, Any] = json.loads(result.stdout)
    return parsed


def failure(*arguments: str) -> str:
    result = invoke(*arguments, "--seconds", "0.5")
    assert isinstance(result.exception, PenstockError), (result.output, result.exception)
    return str(result.exception)


class TestPrograms:
    @full_only("a program for each", but=["slowly:make-thread", "slowly.py:theirs-thread"])
    @pytest.mark.clock
    @pytest.mark.parametrize(
        ("target", "executor"),
        [
            ("slowly:theirs", "process"),
            ("slowly.py:theirs", "thread"),
            ("slowly:make", "thread"),
            ("slowly:Box.loader", "thread"),
        ],
    )
    def test_loaders(self, program: Path, target: str, executor: str) -> None:
        """Processes are what is tried by default."""
        report = found(target, *(() if executor == "process" else ("--executor", executor)))
        assert report["name"] == target
        assert report["verdict"]["limit"] == "read"
        assert report["batch_size"] == (2 if target.endswith("make") else 4)
        assert {"inline", executor} == {trial["setting"]["executor"] for trial in report["trials"]}
        read = next(stage for stage in report["stages"] if stage["name"] == "read")
        assert read["again"] >= 0.01
        assert read["ceiling_one_core"] == pytest.approx(1 / read["again"])

    def test_tables_step_and_report(self, program: Path, tmp_path: Path) -> None:
        page = tmp_path / "report.html"
        result = invoke("slowly:theirs", "--seconds", "0.5", "--step-ms", "0.5", "--html", str(page))
        assert result.exit_code == 0, (result.output, result.exception)
        for text in ("read <", "one core", "1 process", "'read' is the slowest", "Best on this machine", "keep up"):
            assert text in result.output
        assert str(page) in result.output
        assert page.read_text().count("<svg") == 4

    def test_threads_if_asked_for(self, program: Path) -> None:
        trials = found("slowly:theirs", "--executor", "thread")["trials"]
        assert {trial["setting"]["executor"] for trial in trials} == {"inline", "thread"}

    def test_errors_say_what_to_do(self, program: Path) -> None:
        assert "it has theirs" in failure("slowly:their")
        assert "is an int: name a torch" in failure("slowly:number")
        assert "cannot be called without arguments" in failure("slowly:needs")
        assert "NoneType" in failure("slowly:returns_none")
        assert "no module 'slowli'" in failure("slowli:theirs")
        assert "no file 'slowli.py'" in failure("slowli.py:theirs")
        program.with_name("slowly.v2.py").write_text(PROGRAM)
        assert "rename it, for example to slowly_v2.py" in failure("slowly.v2.py:theirs")
        assert "name the file ./slowly.py" in failure("./slowly:theirs")
        assert "write slowly.py:NAME" in failure("slowly.py")
        program.with_name("train.txt").write_text("a.jpg 1\n")
        assert "for a path leave ':NAME' out: 'train.txt'" in failure("train.txt:theirs")
        program.with_name("json.py").write_text("loader = 1")
        assert "another module has the name 'json'" in failure("json.py:loader")
        assert "leave them out" in failure("slowly:theirs", "--root", ".")
        assert "leave them out" in failure("slowly:theirs", "--batch-size", "64")
        assert "leave them out" in failure("slowly:theirs", "--size", "32")
        assert "its folder does not exist" in failure("slowly:theirs", "--html", "nowhere/report.html")
        assert "this is a folder" in failure("slowly:theirs", "--html", ".")
        assert "no such file" in failure("nowhere.txt")
        program.with_name("empty.txt").write_text("")
        assert "empty.txt is empty" in failure("empty.txt")
        assert invoke("slowly:theirs", "--executor", "fast").exit_code == 2

    def test_a_program_with_an_error_of_its_own_keeps_it(self, program: Path) -> None:
        program.with_name("bad_import.py").write_text("import not_installed_anywhere\nloader = None\n")
        result = invoke("bad_import:loader")
        assert isinstance(result.exception, ModuleNotFoundError)
        assert result.exception.name == "not_installed_anywhere"

    def test_in_a_process_of_its_own(self, program: Path) -> None:
        """The exit code and the one line of an error."""
        done = run(["-m", "penstock", "profile", "slowly:number"], timeout=HANG, cwd=program.parent)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("error: slowly:number is an int")


def jpeg() -> bytes:
    ok, data = cv2.imencode(".jpg", np.zeros((40, 50, 3), np.uint8))
    assert ok
    return bytes(data)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    for number in range(30):
        path = tmp_path / "data" / f"class_{number // 10}" / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg())
    lines = [f"class_{number // 10}/{number}.jpg {number // 10}\n" for number in range(30)]
    (tmp_path / "train.txt").write_text("".join(lines))
    return tmp_path


class TestPaths:
    def test_a_manifest_of_images(self, images: Path) -> None:
        source = str(images / "train.txt")
        report = found(source, "--root", str(images / "data"), "--batch-size", "8", "--size", "32")
        assert (report["batch_size"], report["name"]) == (8, source)
        assert report["dropped"] >= 8
        assert {"read", "decode", "augment"} <= {stage["name"] for stage in report["stages"]}

    def test_images_that_no_memory_holds(self, images: Path) -> None:
        said = failure(str(images / "train.txt"), "--root", str(images / "data"), "--size", "1000000")
        assert "at 1000000 x 1000000 pixels a batch of 30 images takes 90 TB, and " in said

    @full_only("measures for seconds")
    def test_a_folder_of_images_and_shards_of_them(self, images: Path) -> None:
        report = found(str(images / "data"), "--size", "32", "--batch-size", "8")
        assert "decode" in {stage["name"] for stage in report["stages"]}
        with tarfile.open(images / "train-000.tar", "w") as archive:
            for number in range(20):
                for name, data in (("jpg", jpeg()), ("cls", b"1")):
                    info = tarfile.TarInfo(f"{number:03d}.{name}")
                    info.size = len(data)
                    archive.addfile(info, io.BytesIO(data))
        report = found(str(images / "train-000.tar"), "--size", "32", "--batch-size", "8")
        assert {"read", "decode", "augment"} <= {stage["name"] for stage in report["stages"]}

    @full_only("measures for seconds")
    def test_other_files_as_bytes_and_arrays(self, tmp_path: Path) -> None:
        for number in range(12):
            (tmp_path / f"{number}.bin").write_bytes(bytes(number + 1))
        (tmp_path / "train.txt").write_text("".join(f"{number}.bin {number}\n" for number in range(12)))
        report = found(str(tmp_path / "train.txt"), "--root", str(tmp_path), "--batch-size", "4")
        assert "read" in {stage["name"] for stage in report["stages"]}
        np.save(tmp_path / "rows.npy", np.zeros((64, 4), np.float32))
        assert found(str(tmp_path / "rows.npy"), "--batch-size", "4")["batch_size"] == 4
        assert "rows.npy is none: leave --root out" in failure(str(tmp_path / "rows.npy"), "--root", str(tmp_path))
        files = ("train.txt", "--root", str(tmp_path)), ("rows.npy",)
        for name, *options in files:
            assert "--size is for images" in failure(str(tmp_path / name), *options, "--size", "32")

    @full_only("measures for seconds")
    def test_mds_folders(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "shards"))
        from mds_writer import write_mds

        samples = [{"image": jpeg(), "label": number} for number in range(24)]
        write_mds(tmp_path / "images", {"image": "jpeg", "label": "int"}, samples)
        report = found(str(tmp_path / "images"), "--size", "32", "--batch-size", "8")
        assert {"decode", "augment", "collate"} <= {stage["name"] for stage in report["stages"]}
        texts = [{"text": "a" * number} for number in range(24)]
        write_mds(tmp_path / "texts", {"text": "str"}, texts)
        assert found(str(tmp_path / "texts"), "--batch-size", "8")["verdict"]["rate"] > 0
        assert "--size is for images" in failure(str(tmp_path / "texts"), "--size", "32")
        assert "leave --label, --cache-dir out" in failure(
            str(tmp_path / "texts"), "--label", "none", "--cache-dir", str(tmp_path)
        )


def test_a_target_is_a_path_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.tools.cli.profile_source import names_a_loader

    monkeypatch.chdir(tmp_path)
    assert names_a_loader("train:loader")
    assert names_a_loader("my.train:build.loader")
    assert names_a_loader("/programs/train.py:loader")
    assert not names_a_loader("s3://bucket/train.txt")
    assert not names_a_loader("train.txt")
    assert not names_a_loader("train-{000..099}.tar")
    Path("odd:name").touch()
    assert not names_a_loader("odd:name")


def test_options_that_make_no_sense(tmp_path: Path) -> None:
    assert invoke("a:b", "--seconds", "0").exit_code == 2
    assert invoke("a:b", "--step-ms", "0").exit_code == 2
    assert isinstance(invoke("a:b").exception, ConfigError)
