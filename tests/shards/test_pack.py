"""Packing, verifying, cutting and joining shards, and the commands for it."""

from __future__ import annotations

import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from busy_support import HANG
from full_run import full_only
from PIL import Image
from shard_support import make_tar, samples, write_shards
from typer.testing import CliRunner

from penstock.errors import ConfigError, ImageError, ManifestError, ShardError, ShardIOError
from penstock.manifest import Manifest
from penstock.shards import ShardSet
from penstock.shards.pack import pack
from penstock.storage import file_lock
from penstock.tools.check_shards import verify
from penstock.tools.cli.app import app


def jpeg(width: int, height: int, seed: int) -> bytes:
    out = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(out, "JPEG")
    return out.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i in range(24):
        path = tmp_path / "in" / f"class {i % 3}" / f"img_{i:03d}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(40 if i % 2 else 20, 24, i))
    return tmp_path / "in"


def digests(out: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(out.glob("*.tar"))}


def test_a_folder(folder: Path, tmp_path: Path) -> None:
    report = pack(folder, tmp_path / "out", max_count=10, progress=False)
    assert (len(report.shards), report.samples, report.kept) == (3, 24, 0)
    assert sorted(os.listdir(tmp_path / "out")) == sorted(
        [f"train-{k:06d}.tar{s}" for k in range(3) for s in ("", ".pidx")]
        + ["checksums.txt", "files.txt", "files.txt.pstk", "pack.json"]
    )
    shards = ShardSet(report.shards)
    assert len(shards) == 24
    paths = sorted(folder.rglob("*.JPEG"))
    for i, path in enumerate(paths):
        assert shards[i]["jpg"] == path.read_bytes()
        assert int(shards[i]["cls"]) == int(path.parent.name[-1])
        assert shards[i]["__key__"] == f"{i:09d}"
    assert all(verify(name, decode=True).ok for name in report.shards)


def test_a_manifest_shuffled_and_the_same_for_any_workers(folder: Path, tmp_path: Path) -> None:
    lines = [f"{path.relative_to(folder)},{i % 3},{i / 2}" for i, path in enumerate(sorted(folder.rglob("*.JPEG")))]
    source = tmp_path / "list.csv"
    source.write_text("path,label,score\n" + "\n".join(lines) + "\n")
    manifest = Manifest.open(source, root=folder, columns=["path", "label", "score:float"])
    options = {"max_bytes": 9000, "shuffle": True, "seed": 3, "progress": False}
    one = pack(manifest, tmp_path / "one", **options)  # type: ignore[arg-type]
    two = pack(manifest, tmp_path / "two", workers=2, **options)  # type: ignore[arg-type]
    assert digests(tmp_path / "one") == digests(tmp_path / "two")
    assert all(os.path.getsize(name) <= 10240 for name in one.shards)
    shards = ShardSet(two.shards)
    keys = [int(shards.key(i)) for i in range(24)]
    assert keys != sorted(keys)
    assert sorted(keys) == list(range(24))
    assert json.loads(shards[0]["json"]) == {"score": keys[0] / 2}


def test_each_shard_has_as_many_samples_as_fit(tmp_path: Path) -> None:
    for number in range(12):
        path = tmp_path / "in" / "a class" / f"{number:02d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(1000))
    for more, counts in ((0, [4, 4, 4]), (-1, [3, 3, 3, 3])):
        # A header and two blocks of the picture, a header and a block of its class; and the end of the archive.
        report = pack(tmp_path / "in", tmp_path / f"out{more}", max_bytes=4 * 5 * 512 + 4 * 512 + more, progress=False)
        assert [len(ShardSet([name])) for name in report.shards] == counts


def test_resize(folder: Path, tmp_path: Path) -> None:
    report = pack(folder, tmp_path / "out", resize_max_side=24, progress=False)
    shards = ShardSet(report.shards)
    sizes = {Image.open(io.BytesIO(sample["jpg"])).size for sample in shards}
    assert sizes == {(24, 14), (20, 24)}
    (folder / "class 0" / "img_000.JPEG").write_bytes(b"\xff\xd8 no image")
    with pytest.raises(ImageError, match=r"img_000\.JPEG"):
        pack(folder, tmp_path / "other", resize_max_side=24, progress=False)


def test_going_on(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    pack(folder, out, max_count=5, progress=False)
    before = digests(out)
    (out / "train-000002.tar").unlink()
    (out / "train-000003.tar").write_bytes(b"cut")
    (out / "train-000001.tar.pidx").unlink()
    report = pack(folder, out, max_count=5, progress=False)
    assert report.kept == 2
    assert digests(out) == before
    with pytest.raises(ConfigError, match="max_count differ"):
        pack(folder, out, max_count=6, progress=False)


PROGRAM = """
import sys
from penstock.shards.pack import pack
if __name__ == "__main__":
    pack(sys.argv[1], sys.argv[2], max_count=1, workers=2, progress=False)
"""


@full_only("a program that is killed; tests/faults/test_pools.py has one")
def test_kill_and_go_on(folder: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    out = tmp_path / "out"
    process = subprocess.Popen([sys.executable, program, folder, out], start_new_session=True)
    deadline = time.monotonic() + HANG
    while time.monotonic() < deadline and len(list(out.glob("*.tar"))) < 3:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    there = len(list(out.glob("*.tar")))
    assert there >= 3
    for path in out.glob("*.tar"):
        assert verify(str(path)).ok
    (out / ".train-000002.tar.0a1b2c3d.tmp").write_bytes(b"half")
    (out / ".other-000002.tar.0a1b2c3d.tmp").write_bytes(b"of somebody else")
    pack(folder, out, max_count=1, progress=False)
    assert [path.name for path in out.glob(".*.tmp")] == [".other-000002.tar.0a1b2c3d.tmp"]
    pack(folder, tmp_path / "whole", max_count=1, progress=False)
    assert digests(out) == digests(tmp_path / "whole")


def test_errors(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("missing.jpg 1\n")
    with pytest.raises(ShardIOError, match=r"missing\.jpg"):
        pack(tmp_path / "list.txt", tmp_path / "out", root=folder, progress=False)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no images"):
        pack(tmp_path / "empty", tmp_path / "out2", progress=False)
    with pytest.raises(ConfigError, match="positive"):
        pack(folder, tmp_path / "out3", workers=0)
    with pytest.raises(ConfigError, match="cannot contain a folder"):
        pack(folder, tmp_path / "out3", prefix="a/b")
    with file_lock(tmp_path / "out3" / "pack.json"), pytest.raises(ConfigError, match="another process packs"):
        pack(folder, tmp_path / "out3")
    (folder / "class 1" / "a\nb.jpg").write_bytes(b"")
    with pytest.raises(ManifestError, match=r"a\\nb\.jpg.*rename"):
        pack(folder, tmp_path / "out4", progress=False)


@pytest.mark.parametrize("damaged", [b"", b"{", b"\xff", b"[]", b"{}", b'{"cuts": 3}', b'{"cuts": [null]}', b"null"])
def test_a_damaged_plan(folder: Path, tmp_path: Path, damaged: bytes) -> None:
    out = tmp_path / "out"
    report = pack(folder, out, max_count=10, progress=False)
    (out / "pack.json").write_bytes(damaged)
    with pytest.raises(ShardError, match=r"pack\.json is damaged: remove it"):
        pack(folder, out, max_count=10, progress=False)
    (out / "pack.json").unlink()
    assert pack(folder, out, max_count=10, progress=False).kept == len(report.shards)


def test_verify_finds(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    good = make_tar([*samples(5), ("d/", b"")])

    def problems(data: bytes) -> str:
        path.write_bytes(data)
        return "\n".join(verify(str(path)).problems)

    assert problems(good) == ""
    assert "ends at byte" in problems(good[:5000])
    assert "behind the end mark" in problems(good + good)
    assert "keys come twice" in problems(make_tar([("a.x", b""), ("b.x", b""), ("a.x", b"")]))
    assert "1 of 3 samples have other parts" in problems(make_tar([("a.x", b""), ("b.x", b""), ("c.y", b"")]))
    path.write_bytes(good)
    ShardSet(path)
    beside = Path(f"{path}.pidx")
    sound = beside.read_bytes()
    os.utime(path, ns=(0, 0))
    assert problems(good) == ""  # of another time, but of the same content
    ShardSet(path)
    for damaged in (sound[:-1], sound[:-1] + b"x", b""):
        beside.write_bytes(damaged)
        assert "is not that of this shard" in "\n".join(verify(str(path)).problems)
    beside.write_bytes(sound)
    assert "is not that of this shard" in problems(make_tar(samples(4)))
    assert problems(good) == ""
    (tmp_path / "checksums.txt").write_text("0" * 32 + "  a.tar\n")
    assert "not what was packed" in "\n".join(verify(str(path)).problems)
    assert "no such file" in verify(str(tmp_path / "none.tar")).problems[0]


def run(*arguments: object, code: int = 0) -> str:
    """What a command prints, in this process."""
    done = CliRunner().invoke(app, ["shards", *map(str, arguments)])
    assert done.exit_code == code, done.output
    return done.output


def run_alone(*arguments: object, code: int = 0) -> tuple[bytes, bytes]:
    """The same in a process of its own."""
    command = [sys.executable, "-m", "penstock", "shards", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, timeout=HANG, check=False)
    assert done.returncode == code, (done.stdout, done.stderr)
    return done.stdout, done.stderr


def test_commands(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "24" in run("pack", folder, out, "--maxcount", 10, "--workers", 2)
    pattern = f"{out}/train-{{000000..000002}}.tar"
    assert "all are up to date" in run("index", pattern)
    assert "B/s" in run("index", pattern, "--force")
    text = run("info", pattern)
    for part in ("24; 4 to 10 in a shard", ".jpg", "000000000 to 000000023"):
        assert part in text
    assert run("ls", pattern).splitlines()[23] == "000000023  cls jpg"
    assert " at " in run("ls", out / "train-000000.tar", "-l")
    paths = sorted(folder.rglob("*.JPEG"))
    assert CliRunner().invoke(app, ["shards", "cat", pattern, "000000011.jpg"]).stdout_bytes == paths[11].read_bytes()
    assert b"no file" in run_alone("cat", pattern, "nothing.jpg", code=1)[1]
    assert "no problems" in run("verify", pattern, "--decode", "--workers", 2)
    data = (out / "train-000001.tar").read_bytes()
    (out / "train-000001.tar").write_bytes(data[:2000])
    assert "train-000001.tar: ends at byte 2000" in run("verify", pattern, code=1)
    for wrong, why in {"big": "is not a size", "inf": "is not a size", "0": "too small"}.items():
        assert why in " ".join(run("pack", folder, out, "--maxsize", wrong, code=2).split())


def test_cat_of_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ShardError):
        ShardSet(write_shards(tmp_path, [1])).shard(0).file.read_exact(10, 1 << 40)
