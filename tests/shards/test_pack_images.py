"""Packing for crops: restart markers in the images, or an index of entries beside each shard."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from busy_support import HANG
from full_run import full_only
from jpeg_support import USUAL, by_opencv, jpeg, noise
from typer.testing import CliRunner

from penstock.errors import ConfigError, ShardIOError
from penstock.images import native
from penstock.images.decode import MAX_PIXELS, decode
from penstock.shards import ShardSet
from penstock.shards.entries import has_entries, open_entries, write_entries
from penstock.shards.index import load_or_build
from penstock.shards.pack import PackReport, pack
from penstock.shards.writer import TarWriter
from penstock.storage import Cache, Storage
from penstock.tools.check_shards import verify
from penstock.tools.cli.app import app

pytestmark = pytest.mark.skipif(not native.is_available(), reason="penstock.images._jpeg was not built")

BASELINE = 20
OTHERS = ("20.jpg", "21.jpg", "22.png", "23.jpg")  # progressive, cut, no JPEG, markers that are not divisors


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """24 files of two classes: 20 baseline JPEGs, one that has markers, and three that stay as they are."""
    where = tmp_path / "in"
    for label in ("a", "b"):
        (where / label).mkdir(parents=True)
    for number in range(BASELINE):
        data = jpeg(noise(60 + 7 * number, 130 - 3 * number, number), USUAL[number % len(USUAL)])
        (where / "ab"[number % 2] / f"{number:02d}.jpg").write_bytes(data)
    (where / "b" / OTHERS[0]).write_bytes(by_opencv(noise(40, 40), cv2.IMWRITE_JPEG_PROGRESSIVE, 1))
    (where / "b" / OTHERS[1]).write_bytes(jpeg(noise(90, 60))[:-600])
    (where / "b" / OTHERS[2]).write_bytes(cv2.imencode(".png", noise(40, 40))[1].tobytes())
    (where / "b" / OTHERS[3]).write_bytes(by_opencv(noise(90, 200), cv2.IMWRITE_JPEG_RST_INTERVAL, 5))
    return where


def packed(folder: Path, out: Path, **options: object) -> PackReport:
    return pack(folder, out, max_count=5, progress=False, **options)  # type: ignore[arg-type]


def digests(out: Path) -> dict[str, str]:
    names = [path for path in out.iterdir() if path.name.endswith((".tar", ".entries", "checksums.txt"))]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(names)}


def sources(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(folder.rglob("*.*"), key=lambda path: (path.parent, path.name))]


def image(sample: dict[str, bytes]) -> bytes:
    return sample["jpg"] if "jpg" in sample else sample["png"]


class TestRestartMarkers:
    def test_baseline_files_get_them_and_others_stay(self, folder: Path, tmp_path: Path) -> None:
        report = packed(folder, tmp_path / "out", restart_markers=True)
        assert (report.samples, report.marked, report.unmarked, report.indexed) == (24, 21, 3, 0)
        shards, plain = ShardSet(report.shards), sources(folder)
        changed = 0
        for sample, data in zip(shards, plain, strict=True):
            found = image(sample)
            assert found == (native.with_restart_markers(data, max_pixels=MAX_PIXELS) or data)
            changed += found != data
            if len(data) != 600 and found != data:
                assert np.array_equal(decode(found), decode(data))
        assert changed == 21
        assert not list((tmp_path / "out").glob("*.entries"))

    def test_the_same_bytes_for_any_workers_and_after_a_loss(self, folder: Path, tmp_path: Path) -> None:
        report = packed(folder, tmp_path / "one", restart_markers=True)
        assert packed(folder, tmp_path / "two", restart_markers=True, workers=2) == report.__class__(
            [name.replace("/one/", "/two/") for name in report.shards], *list(vars(report).values())[1:]
        )
        assert digests(tmp_path / "one") == digests(tmp_path / "two")
        Path(report.shards[1]).unlink()
        again = packed(folder, tmp_path / "one", restart_markers=True)
        assert (again.kept, again.marked, again.unmarked) == (4, 5, 0)
        assert digests(tmp_path / "one") == digests(tmp_path / "two")

    def test_another_packing_is_refused(self, folder: Path, tmp_path: Path) -> None:
        packed(folder, tmp_path / "with", restart_markers=True)
        with pytest.raises(ConfigError, match="restart_markers differ"):
            packed(folder, tmp_path / "with")
        packed(folder, tmp_path / "without")
        with pytest.raises(ConfigError, match="restart_markers differ"):
            packed(folder, tmp_path / "without", restart_markers=True)
        plan = tmp_path / "without" / "pack.json"
        written = json.loads(plan.read_bytes())
        assert written.pop("restart_markers") is False
        plan.write_text(json.dumps(written))  # as before there was such an option
        assert packed(folder, tmp_path / "without").kept == 5
        with pytest.raises(ConfigError, match="restart_markers differ"):
            packed(folder, tmp_path / "without", restart_markers=True)

    def test_images_that_are_made_smaller_get_them_too(self, folder: Path, tmp_path: Path) -> None:
        (folder / "b" / OTHERS[1]).unlink()
        options = {"resize_max_side": 64, "progress": False}
        small = pack(folder, tmp_path / "small", **options)  # type: ignore[arg-type]
        marked = pack(folder, tmp_path / "marked", restart_markers=True, **options)  # type: ignore[arg-type]
        assert (marked.marked, marked.unmarked) == (21, 2)
        for before, after in zip(ShardSet(small.shards), ShardSet(marked.shards), strict=True):
            data = image(before)
            assert image(after) == (native.with_restart_markers(data, max_pixels=MAX_PIXELS) or data)


class TestIndex:
    def test_each_shard_has_the_entries_of_its_images(self, folder: Path, tmp_path: Path) -> None:
        plain = packed(folder, tmp_path / "plain")
        report = packed(folder, tmp_path / "out", index_images=True)
        assert (report.samples, report.marked, report.unmarked, report.indexed) == (24, 0, 0, 20)
        expected = digests(tmp_path / "plain")
        found = digests(tmp_path / "out")
        assert {name: found[name] for name in expected} == expected
        assert sorted(set(found) - set(expected)) == [f"train-{k:06d}.tar.entries" for k in range(5)]
        files = iter(sources(folder))
        for name in plain.shards:
            index = load_or_build(name)
            entries = open_entries(name.replace("plain", "out"), index)
            assert len(entries) == len(index)
            for number in range(len(index)):
                data = next(files)
                assert entries.entries(number, data) == native.entries_of(data)

    def test_the_same_bytes_for_any_workers(self, folder: Path, tmp_path: Path) -> None:
        packed(folder, tmp_path / "one", index_images=True)
        assert packed(folder, tmp_path / "two", index_images=True, workers=2).indexed == 20
        assert digests(tmp_path / "one") == digests(tmp_path / "two")

    def test_shards_that_are_there_get_theirs(self, folder: Path, tmp_path: Path) -> None:
        out = tmp_path / "out"
        names = packed(folder, out).shards
        times = [os.stat(name).st_mtime_ns for name in names]
        report = packed(folder, out, index_images=True)
        assert (report.kept, report.indexed) == (5, 20)
        assert packed(folder, out, index_images=True) == PackReport(names, 24, report.nbytes, 5, 0, 0, 0)
        before = digests(out)
        Path(f"{names[0]}.entries").unlink()
        content = bytearray(Path(f"{names[1]}.entries").read_bytes())
        Path(f"{names[1]}.entries").write_bytes(content[:-1])
        Path(f"{names[2]}.entries").write_bytes(Path(f"{names[3]}.entries").read_bytes())
        assert [has_entries(name) for name in names] == [False, False, False, True, True]
        assert packed(folder, out, index_images=True, workers=2).indexed == 15
        assert digests(out) == before
        assert [os.stat(name).st_mtime_ns for name in names] == times

    def test_samples_without_images_and_with_several(self, tmp_path: Path) -> None:
        """The entries are those of the first image, which is the one that is decoded."""
        files = [jpeg(noise(90, 110, number)) for number in range(2)]
        path = str(tmp_path / "a.tar")
        with TarWriter(path) as writer:
            writer.write({"__key__": "0", "txt": b"no image"})
            writer.write({"__key__": "1", "a.jpg": files[0], "b.jpg": files[1], "txt": b""})
        assert write_entries(path) == 1
        entries = open_entries(path, load_or_build(path))
        assert entries.entries(0, b"no image") is None
        assert entries.entries(1, files[0]) == native.entries_of(files[0])
        assert verify(path).problems == ["1 of 2 samples have other parts than txt"]

    def test_verify(self, folder: Path, tmp_path: Path) -> None:
        (folder / "b" / OTHERS[2]).unlink()  # a part that others do not have
        names = packed(folder, tmp_path / "out", index_images=True).shards
        assert all(verify(name).ok for name in names)
        path = Path(f"{names[0]}.entries")
        content = path.read_bytes()
        for at, problem in ((3, "its header is invalid"), (-1, "those of sample 4"), (90, "those of sample 1")):
            damaged = bytearray(content)
            damaged[at] ^= 1
            path.write_bytes(damaged)
            [found] = verify(names[0]).problems
            assert problem in found
            assert "penstock shards index --images" in found
        path.write_bytes(Path(f"{names[1]}.entries").read_bytes())
        assert "belongs to another shard" in verify(names[0]).problems[0]
        Path(f"{names[0]}.pidx").unlink()  # which verify does not make
        assert "belongs to another shard" in verify(names[0]).problems[0]
        path.write_bytes(content)
        assert verify(names[0]).ok


@pytest.mark.parametrize("copied", [False, True])
def test_shards_in_a_store_are_read_without(copied: bool, server: Any, folder: Path, tmp_path: Path) -> None:
    """And those beside them in the same set, which are files, with their entries."""
    names = packed(folder, tmp_path / "out", index_images=True).shards
    urls = list(names)
    for number in (0, 2):
        name = Path(names[number]).name
        for suffix in (".entries", ".pidx", ""):
            urls[number] = server.put(name + suffix, Path(names[number] + suffix).read_bytes())
    shards = ShardSet(urls, copy=copied, storage=Storage(cache=Cache(tmp_path / "cache")))
    rows = [0, 14, 3, 7, -24, 16, 11]
    records, expected = shards.image_records(rows), ShardSet(names).image_records(rows)
    for record, other in zip(records, expected, strict=True):
        assert record.read() == other.read()
        assert other.entries is not None
        remote = "http" in record.path
        assert record.entries is None if remote else record.entries(record.read()) == other.entries(other.read())
    assert [record.entries is None for record in records] == [True, True, True, False, True, False, True]
    assert not [path for path, _ in server.data_requests() if path.endswith(".entries")]


class TestRefused:
    def test_both(self, folder: Path, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="restart_markers or index_images, not both"):
            packed(folder, tmp_path / "out", restart_markers=True, index_images=True)
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("option", ["restart_markers", "index_images"])
    def test_without_the_extension(
        self, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
    ) -> None:
        monkeypatch.setattr(native, "_jpeg", None)
        with pytest.raises(ConfigError, match="the C extension, which is not built here: `penstock doctor` shows"):
            packed(folder, tmp_path / "out", **{option: True})
        assert not (tmp_path / "out").exists()

    def test_a_full_disk(self, folder: Path, tmp_path: Path) -> None:
        [name, *_] = packed(folder, tmp_path / "out").shards
        program = (
            "import resource, sys\n"
            "from penstock.shards.entries import write_entries\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (400, 400))\n"
            "write_entries(sys.argv[1])\n"
        )
        done = subprocess.run([sys.executable, "-c", program, name], capture_output=True, text=True, timeout=HANG)
        assert "ShardIOError: cannot write an index of entries to" in done.stderr
        assert not list((tmp_path / "out").glob("*.entries")) + list((tmp_path / "out").glob(".*.tmp"))
        with pytest.raises(ShardIOError, match=r"no\.tar"):
            write_entries(str(tmp_path / "no.tar"))


PROGRAM = """
import sys
from penstock.shards.pack import pack
if __name__ == "__main__":
    pack(sys.argv[1], sys.argv[2], max_count=1, workers=2, index_images=True, progress=False)
"""


@full_only("a program that is killed; tests/faults/test_pools.py has one")
def test_kill_and_go_on(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    out = tmp_path / "out"
    process = subprocess.Popen([sys.executable, tmp_path / "program.py", folder, out], start_new_session=True)
    deadline = time.monotonic() + HANG
    while time.monotonic() < deadline and len(list(out.glob("*.entries"))) < 3:
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert len(list(out.glob("*.entries"))) >= 3
    (out / ".train-000002.tar.entries.0a1b2c3d.tmp").write_bytes(b"half")
    pack(folder, out, max_count=1, index_images=True, progress=False)
    assert not list(out.glob(".*.tmp"))
    pack(folder, tmp_path / "whole", max_count=1, index_images=True, progress=False)
    assert digests(out) == digests(tmp_path / "whole")


def run(*arguments: object, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["shards", *map(str, arguments)])
    assert done.exit_code == code, done.output
    return done.output


def test_commands(folder: Path, tmp_path: Path) -> None:
    marked, indexed, plain = tmp_path / "marked", tmp_path / "indexed", tmp_path / "plain"
    text = " ".join(run("pack", folder, marked, "--restart-markers").split())
    assert "re-marked 21 images; 3 unchanged" in text
    assert "entries written for 20 images" in " ".join(
        run("pack", folder, indexed, "--index-images", "--workers", 2).split()
    )
    found = json.loads(run("pack", folder, plain, "--maxcount", 5, "--json"))
    assert (found["marked"], found["unmarked"], found["indexed"]) == (0, 0, 0)
    assert "entries written for 20 images" in " ".join(run("index", plain, "--images", "--workers", 2).split())
    assert json.loads(run("index", plain, "--images", "--json"))["indexed_images"] == 0
    assert json.loads(run("index", plain, "--images", "--force", "--json"))["indexed_images"] == 20
    assert json.loads(run("index", plain, "--json"))["indexed_images"] is None
    for where in (marked, indexed, plain):
        assert "1 with problems" in run("verify", where, code=1)  # one sample has another part than the others
        assert len(run("ls", where).splitlines()) == 24
        assert "24" in run("info", where)
    entries = plain / "train-000003.tar.entries"
    entries.write_bytes(entries.read_bytes()[:-1])
    assert "not an index of entries, or is damaged" in " ".join(run("verify", plain, code=1).split())


def test_a_shard_in_a_store_is_refused() -> None:
    done = CliRunner().invoke(app, ["shards", "index", "s3://bucket/a.tar", "--images"])
    assert "s3://bucket/a.tar is in a store, but entries work for local shards only" in str(done.exception)
