"""What is made of local data and kept: `penstock cache` lists, clears and bounds it, and nobody loses a file in use."""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from busy_support import HANG
from typer.testing import CliRunner
from video_support import write_video

import penstock as ps
from penstock.errors import DataFileIOError
from penstock.images.entries import ImageIndex
from penstock.storage import cache_root, derived, file_lock
from penstock.storage.derived import KINDS, DerivedFile, clear, derived_files, derived_path, evict, write_derived
from penstock.tools.cli.app import app

Disk = namedtuple("Disk", "total used free")
WHOLE: dict[str, Any] = {"rank": 0, "world_size": 1}
DAY = 86400.0


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def run(*arguments: object) -> Any:
    result = CliRunner().invoke(app, ["cache", *map(str, arguments)])
    assert result.exit_code == 0, (result.output, result.exception)
    return json.loads(result.stdout) if "--json" in arguments else result.stdout


def write(name: str, size: int = 1000, *, days: float = 0.0, kind: str = "classes") -> Path:
    """Keep a file that was used so many days ago."""
    path = derived_path(kind, name)
    path.parent.mkdir(exist_ok=True)
    with write_derived(path) as file:
        file.write(bytes(size))
    os.utime(path, (time.time() - days * DAY,) * 2)
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_in_the_place_of_a_file_is_named(kind: str) -> None:
    path = derived_path(kind, "a.x")
    path.mkdir(parents=True)
    with pytest.raises(DataFileIOError, match=rf"{path} is a folder, but should be a file \({KINDS[kind]}\)"):
        derived_path(kind, "a.x")


def names() -> list[str]:
    return [path.name for file in derived_files() for path in sorted(file.paths)]


def of_kind(kind: str) -> list[DerivedFile]:
    return [file for file in derived_files() if file.kind == kind]


def make_all(server: Any) -> dict[str, Any]:
    """Make something of each kind, by the data sets that do."""
    tar, pixels = io.BytesIO(), cv2.imencode(".png", np.zeros((8, 8, 3), np.uint8))[1]
    with tarfile.open(fileobj=tar, mode="w") as file:
        file.addfile(tarfile.TarInfo("a.txt"))
    Path("images/cat").mkdir(parents=True)
    Path("images/cat/a.png").write_bytes(pixels.tobytes())
    pq.write_table(pa.table({"path": ["a.png"], "label": [0]}), "list.parquet")
    rows = [{"number": number} for number in range(70_000)]
    Path("a.jsonl.gz").write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    pq.write_table(pa.table({"n": np.arange(70_000) % 7 + 1}), "n.parquet")
    (np.arange(1000, dtype=np.uint16) % 10).tofile("a.bin")
    table = ps.TableDataset("n.parquet", **WHOLE)
    mask = np.random.default_rng(0).random(700_000) < 0.5
    return {
        "lines": ps.JsonFiles("a.jsonl.gz"),
        "filters": ps.Subset(range(700_000), mask),
        "classes": ps.TokenBudgetBatchSampler(np.arange(70_000) % 7 + 1, 64, seed=0, rank=0, world_size=1),
        "lengths": ps.PackedDataset(table, 16, lengths="n", **WHOLE).lengths,
        "packs": ps.PackedDataset(table, 16, lengths="n", order="block", block_size=10_000, **WHOLE),
        "tokens": ps.DocumentDataset("a.bin", dtype="uint16", end_token=0, **WHOLE),
        "entries": ImageIndex.learn("a.entries", None, "0" * 32, 5),
        "clips": ps.VideoDataset(write_video("a.mp4", 4), **WHOLE),
        "manifests": ps.Manifest.open(Path("list.parquet"), cache_dir=cache_root() / "manifests"),
        "folders": ps.open("images", **WHOLE),
        "shards": ps.ShardSet([server.put("a.tar", tar.getvalue())]),
    }


def test_what_is_made_is_listed_and_cleared(folder: Path, server: Any) -> None:
    made = make_all(server)
    about = run("info", "--json")["made"]
    assert set(about) == set(KINDS)
    for kind, found in about.items():
        assert found["bytes"] == sum(path.stat().st_size for path in (cache_root() / kind).iterdir())
    assert about["lines"]["count"] == 1  # an index and its copy
    text = run("info")
    assert all(f"{kind}, " in text for kind in KINDS)
    del made
    assert run("clear", "--unused-days", 1, "--json")["made_removed"] == 0
    cleared = run("clear", "--json")
    counted = sum(found["count"] for kind, found in about.items() if kind != "locks")
    assert cleared["made_removed"] + cleared["made_in_use"] == counted
    assert run("info", "--json")["made_bytes"] == sum(file.size for file in derived_files())
    assert ps.JsonFiles("a.jsonl.gz")[69_999] == {"number": 69_999}  # made again


def test_a_cache_of_copies_has_none(folder: Path) -> None:
    write("a.classes")
    ps.storage.Cache(folder / "copies")
    assert run("info", "--json", "--folder", folder / "copies")["made"] == {}
    assert run("clear", "--json", "--folder", folder / "copies")["made_removed"] == 0
    assert names() == ["a.classes"]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux says what is mapped")
def test_what_a_living_process_has_mapped_stays() -> None:
    mapped, other = write("mapped.classes", days=9), write("other.classes", days=1)
    code = f"import numpy as np; a = np.memmap({str(mapped)!r}); print('mapped', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"mapped\n"
        assert evict(1500) == (1000, 1500)
        assert names() == ["mapped.classes"]
        assert not other.exists()
        assert clear() == (0, 0, 1)
        assert "; kept 1 file in use" in run("clear")
        process.communicate(b"\n", timeout=HANG)
    assert clear() == (1, 1000, 0)


def test_what_is_being_made_stays() -> None:
    path = write("a.classes", days=1)
    with file_lock(path):
        assert clear() == (0, 0, 1)
        assert evict(0) == (1000, 0)
    assert clear() == (1, 1000, 0)


def test_the_least_recently_used_goes_first() -> None:
    for days, kind in ((3, "classes"), (1, "lines"), (2, "filters"), (0, "tokens")):
        write(f"{days}.x", days=days, kind=kind)
    assert evict(4000, but="") == (4000, 4000)
    assert sorted(names()) == ["0.x", "1.x", "2.x", "3.x"]
    derived_path("classes", "3.x")  # is used now
    assert evict(3000) == (3000, 3000)
    assert sorted(names()) == ["0.x", "1.x", "3.x"]
    assert evict(0, but="1") == (3000, 0)  # the others were used in the last minute
    assert evict(0) == (2000, 0)
    assert sorted(names()) == ["0.x", "3.x"]


def test_being_used_does_not_change_a_file() -> None:
    path = write("a.classes", days=5)
    before = path.stat()
    assert derived_path("classes", "a.classes").stat().st_mtime_ns == before.st_mtime_ns
    assert time.time() - of_kind("classes")[0].used < DAY


def test_files_of_one_name_go_together() -> None:
    write("a.idx", 10, days=2, kind="lines")
    write("a.zst", 90, days=1, kind="lines")
    (file,) = derived_files()
    assert (file.size, len(file.paths)) == (100, 2)
    assert evict(99) == (0, 99)
    assert names() == []


def test_writing_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    write("old.classes", 5000, days=3)
    write("new.classes", 5000, days=2)
    derived._left[0] = 0
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Disk(10**9, 10**9, 4000))
    write("newest.classes", 3000)  # 13,000 bytes, where half of 17,000 may be kept
    assert names() == ["new.classes", "newest.classes"]
    with write_derived(Path("elsewhere.classes")) as file:
        file.write(bytes(100_000))
    assert Path("elsewhere.classes").stat().st_size == 100_000


def test_locks_do_not_add_up() -> None:
    for number in range(3):
        lock = file_lock(f"{number}.x")
        os.utime(lock.lock_file, (time.time() - DAY,) * 2)
    with lock:
        evict(100)
        assert [str(path) for file in of_kind("locks") for path in file.paths] == [lock.lock_file]
    assert evict(100) == (0, 100)
    assert names() == []


def test_a_process_counts_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    derived._left[0] = 0
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Disk(10**9, 10**9, 64_000))
    for number in range(40):
        write(f"{number:02}.classes", 10_000, days=40 - number)
    assert sum(file.size for file in derived_files()) <= 64_000 * 1.5
    assert "39.classes" in names()
    assert "00.classes" not in names()


def test_what_a_kill_left_is_removed() -> None:
    path = write("a.classes")
    left, fresh = path.with_name(".b.classes.0123.tmp"), path.with_name(".c.classes.0123.tmp")
    left.write_bytes(b"half")
    fresh.write_bytes(b"half")
    os.utime(left, (time.time() - DAY,) * 2)
    assert names() == ["a.classes"]
    assert (left.exists(), fresh.exists()) == (False, True)
