"""The disk of the user's cache is full, or a data disk: what can be kept elsewhere, or made again, stops nobody."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from busy_support import HANG
from full_run import full_only
from interpreter_support import Popen

PROGRAM = """
import json, os, sys, warnings
import numpy as np
what, folder, limit = sys.argv[1:]
if int(limit):
    import resource, signal
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
import penstock as ps
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    if what == "tokens":
        dataset = ps.TokenDataset(os.path.join(folder, "tokens.npy"), 4, end_token=0)
        found = [len(dataset), dataset[17].tolist()]
    elif what == "manifest":
        manifest = ps.Manifest.open(os.path.join(folder, "train.txt"))
        found = [len(manifest), manifest[70].path]
    elif what == "shards":
        dataset = ps.ShardDataset(os.path.join(folder, "a.tar"))
        found = len(dataset)
    elif what == "packs":
        path = os.path.join(folder, "lengths.npy")
        documents = np.broadcast_to(0, 70_000)
        dataset = ps.PackedDataset(documents, 8192, lengths=path, order="block", block_size=35_000)
        found = [len(dataset), dataset.documents([7]).rows.tolist()]
print(json.dumps([found, [str(one.message) for one in said]]))
"""


def run(what: str, folder: Path, *, cache: Path, limit: int = 0) -> tuple[Any, str]:
    """What a program finds, and its warnings."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache), "TMPDIR": str(folder)}
    with Popen(
        ["-c", PROGRAM, what, str(folder), str(limit)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        out, err = process.communicate(timeout=HANG)
    assert process.returncode == 0, err
    found, said = json.loads(out.splitlines()[-1])
    return found, " ".join(said)


def write_sources(folder: Path) -> None:
    """Tokens, lengths, a manifest and a shard, whose indexes take more than 50 kB each."""
    import numpy as np

    folder.mkdir(exist_ok=True)
    np.save(folder / "tokens.npy", (np.arange(60_000) % 4).astype(np.uint16))
    np.save(folder / "lengths.npy", np.random.default_rng(0).integers(1, 8000, 70_000))
    (folder / "train.txt").write_text("".join(f"{number}.jpg 1\n" for number in range(15_000)))
    with tarfile.open(folder / "a.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
        for number in range(4_000):
            archive.addfile(tarfile.TarInfo(f"a-rather-long-name-{number:09d}.txt"), io.BytesIO())


def left(folder: Path) -> list[str]:
    """Files with something in them."""
    return [str(path) for path in folder.rglob("*") if path.is_file() and path.stat().st_size]


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """A small file system in memory."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a small file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A disk with little room."""
    with mounted(tmp_path / "full", "size=64k") as folder:
        yield folder


@pytest.mark.parametrize("what", ["tokens", "packs"])
def test_a_cache_without_room_for_a_file(what: str, tmp_path: Path) -> None:
    data, cache = tmp_path / "data", tmp_path / "cache"
    write_sources(data)
    expected, said = run(what, data, cache=tmp_path / "other")
    assert said == ""
    found, said = run(what, data, cache=cache, limit=50_000)
    assert found == expected
    assert len(re.findall("cannot be stored there", said)) == 1
    assert left(cache) == []


@full_only("as the others", but=["tokens"])
@pytest.mark.parametrize("what", ["tokens", "packs"])
def test_a_cache_on_a_full_disk(what: str, tmp_path: Path, full: Path) -> None:
    data = tmp_path / "data"
    write_sources(data)
    expected, _ = run(what, data, cache=tmp_path / "other")
    (full / "penstock").mkdir(mode=0o700)
    (full / "penstock" / "filler").write_bytes(bytes(40 << 10))
    found, said = run(what, data, cache=full)
    assert found == expected
    assert re.search("cannot be stored there", said)
    assert left(full) == [str(full / "penstock" / "filler")]


@full_only("as the others", but=["manifest"])
@pytest.mark.parametrize("what", ["manifest", "shards"])
def test_an_index_goes_into_the_cache_where_the_data_disk_is_full(what: str, tmp_path: Path, full: Path) -> None:
    """The data come over links, for they would not fit themselves."""
    write_sources(tmp_path / "data")
    expected, _ = run(what, tmp_path / "data", cache=tmp_path / "other")
    for index in (*tmp_path.glob("data/*.pstk"), *tmp_path.glob("data/*.pidx")):
        index.unlink()
    for path in (tmp_path / "data").iterdir():
        (full / path.name).symlink_to(path)
    found, said = run(what, full, cache=tmp_path / "cache")
    assert (found, said) == (expected, "")
    assert not [path for path in full.iterdir() if not path.is_symlink()]
    assert left(tmp_path / "cache")


def test_locks_are_kept_elsewhere_where_the_cache_takes_no_file(tmp_path: Path) -> None:
    write_sources(tmp_path / "data")
    with mounted(tmp_path / "full", "nr_inodes=3") as full:  # its root, penstock/ and locks/
        found, _ = run("manifest", tmp_path / "data", cache=full)
        assert found[0] == 15_000
        assert [path.name for path in full.rglob("*")] == ["penstock", "locks"]
