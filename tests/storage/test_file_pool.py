"""Open files: all data sets of a process together stay within half of its descriptors."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
from busy_support import HANG
from interpreter_support import run

from penstock.errors import (
    DataFileChangedError,
    ManifestChangedError,
    ShardChangedError,
    StorageChangedError,
    StorageNotFoundError,
)
from penstock.storage.file_pool import FilePool
from penstock.storage.files import DATA, MANIFEST, SHARD, STORED, Family, File
from penstock.storage.mapped import Mapped

PROGRAM = """
import io, os, resource, sys, tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))
import penstock as ps
from penstock.sources.arrays import ArrayFiles

folder = Path(sys.argv[1])
for number in range(150):
    np.save(folder / f"a-{number:03d}.npy", np.array([number]))
    with tarfile.open(folder / f"s-{number:03d}.tar", "w") as archive:
        info = tarfile.TarInfo(f"{number}.cls")
        info.size = len(str(number))
        archive.addfile(info, io.BytesIO(str(number).encode()))
arrays = ArrayFiles(str(folder / "a-*.npy"))
shards = ps.ShardSet(str(folder / "s-*.tar"), progress=False)
rows = np.arange(150)


def read():
    for part in np.array_split(np.random.default_rng(0).permutation(rows), 7):
        assert [int(row) for row in arrays.records(part)] == part.tolist()
        assert [int(sample["cls"]) for sample in shards.records(part)] == part.tolist()
        assert len(os.listdir("/proc/self/fd")) < 256 + 30
    assert [int(sample["cls"]) for sample in shards.records(rows)] == rows.tolist()


read()
opened = len(os.listdir("/proc/self/fd"))
assert opened > 128, opened
child = os.fork()
if not child:
    read()
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
del arrays, shards
assert len(os.listdir("/proc/self/fd")) < opened - 100
print("read")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors by /proc")
def test_all_sets_share_one_limit(tmp_path: Path) -> None:
    done = run(["-c", PROGRAM, str(tmp_path)], timeout=HANG)
    assert done.stdout == "read\n", done.stderr


def test_files_opened_first_are_closed_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.storage.file_pool._limit", lambda: 6)

    def opened(path: Path, *, is_copy: bool = False) -> Mapped:
        return Mapped(File(str(path), is_copy=is_copy), np.empty(0))

    paths = [tmp_path / str(number) for number in range(5)]
    for path in paths:
        path.write_bytes(b"x")
    first, second = FilePool[Mapped](), FilePool[Mapped](copies=True)
    assert first.most == 3
    for number, path in enumerate(paths):
        some = first if number % 2 else second
        assert some.add(number, opened(path, is_copy=number == 2)) is some.find(number)
    assert [one.file.path for one in first] == [str(paths[3])]
    assert [one.file.path for one in second] == [str(paths[2]), str(paths[4])]
    paths[2].unlink()
    paths[4].unlink()  # not a copy in the cache, so it stays
    second.add(9, opened(paths[0]))
    assert [one.file.path for one in second] == [str(paths[4]), str(paths[0])]
    assert [one.file.path for one in first] == [str(paths[3])]


@pytest.mark.parametrize(
    ("family", "kind", "word"),
    [
        (MANIFEST, ManifestChangedError, "manifest"),
        (SHARD, ShardChangedError, "shards"),
        (DATA, DataFileChangedError, "dataset"),
        (STORED, StorageChangedError, "file"),
    ],
    ids=["manifest", "shard", "data", "stored"],
)
def test_a_change_is_an_error_of_the_format(tmp_path: Path, family: Family, kind: type[Exception], word: str) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"0123456789")
    opened = File(str(path), family)
    assert (opened.size, opened.read_at(2, 3), opened.read_at(8, 9)) == (10, b"234", b"89")
    assert opened.stream(4).read() == b"456789"
    assert bytes(opened.map or b"") == b"0123456789"
    again = pickle.loads(pickle.dumps(opened))
    assert (again.read_at(0, 1), again.family) == (b"0", family)
    unmapped = File(str(path), family)
    path.write_bytes(b"012")
    text = pickle.dumps(opened)
    for read in (
        lambda: pickle.loads(text),
        opened.check,
        lambda: opened.read_at(0, 2),
        lambda: opened.read_exact(5, 0),
        lambda: unmapped.map,
    ):
        with pytest.raises(kind, match=rf"it had 10 bytes and has 3.* Open the {word} again"):
            read()
    with pytest.raises(family.missing or family.failed, match="there is no such file") as caught:
        File(str(tmp_path / "none"), family)
    assert isinstance(caught.value, OSError)
    assert isinstance(caught.value, StorageNotFoundError) == (family is STORED)
    os.mkfifo(tmp_path / "pipe")
    for name, message in (("pipe", "not a regular file"), ("", "this is a folder")):
        with pytest.raises(family.failed, match=message):
            File(str(tmp_path / name), family)


def test_files_are_read_without_pread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows."""
    path = tmp_path / "a.bin"
    path.write_bytes(b"0123456789")
    file = File(str(path))
    monkeypatch.delattr(os, "pread", raising=False)
    monkeypatch.delattr(os, "preadv", raising=False)
    assert file.read(4, 8) == b"89"
    assert file.read_exact(4, 2) == b"2345"
    assert file.read_at(8, 4) == b"89"
    assert b"".join(file.pieces(3, 9)) == b"345678"
    with pytest.raises(ManifestChangedError, match="byte 10 was to be read"):
        file.read_exact(4, 8)
