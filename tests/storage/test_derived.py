"""Arrays computed from files: one file for all processes, written again if damaged, in memory if the disk is full."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest

from penstock.errors import DataFileIOError
from penstock.storage import cache_root
from penstock.storage.derived import derived_array, load_or_write

NUMBERS = np.arange(1000)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache_root() / "classes"


class Writer:
    """Writes numbers, and counts how often."""

    def __init__(self, numbers: Any = NUMBERS) -> None:
        self.data, self.calls = np.asarray(numbers).tobytes(), 0

    def __call__(self, out: BinaryIO) -> None:
        self.calls += 1
        out.write(self.data)


def numbers(write: Any, question: str = "numbers", **options: Any) -> np.ndarray:
    return derived_array("classes", question, np.int64, write, "the numbers", **options)


def test_an_array_is_written_once_and_mapped(cache: Path) -> None:
    write = Writer()
    found = [numbers(write) for _ in range(3)]
    assert write.calls == 1
    assert all(isinstance(array, np.memmap) and array.tolist() == NUMBERS.tolist() for array in found)
    assert not found[0].flags.writeable
    (path,) = cache.iterdir()
    assert path.stat().st_size == 64 + NUMBERS.nbytes
    assert numbers(Writer([7]), "others").tolist() == [7]
    assert numbers(Writer([]), "none").tolist() == numbers(Writer([1]), "none").tolist() == []


DAMAGE = {
    "empty": lambda data: b"",
    "header only": lambda data: data[:64],
    "short": lambda data: data[:40],
    "cut short": lambda data: data[:-8],
    "longer": lambda data: data + bytes(8),
    "another file": lambda data: b"x" * len(data),
    "another version": lambda data: data[:8] + b"\xff" + data[9:],
    "checksum": lambda data: data[:63] + bytes([data[63] ^ 1]) + data[64:],
    "array": lambda data: data[:100] + bytes([data[100] ^ 1]) + data[101:],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_written_again(damage: str, cache: Path) -> None:
    numbers(Writer())
    (path,) = cache.iterdir()
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(DAMAGE[damage](data))
    write = Writer()
    assert numbers(write).tolist() == NUMBERS.tolist()
    assert (write.calls, path.read_bytes()) == (1, data)


def test_the_file_of_another_question_is_not_used(cache: Path) -> None:
    numbers(Writer([7]), "others")
    (other,) = cache.iterdir()
    numbers(Writer())
    (path,) = set(cache.iterdir()) - {other}
    other.replace(path)
    assert numbers(Writer()).tolist() == NUMBERS.tolist()


def test_a_writer_may_seek(cache: Path) -> None:
    def write(out: BinaryIO) -> None:
        begin = out.tell()
        out.write(bytes(8) + NUMBERS.tobytes()[8:])
        out.seek(begin)
        out.write(np.int64(5).tobytes())

    assert numbers(write).tolist() == [5, *NUMBERS[1:].tolist()]


def test_processes_write_one_file(cache: Path) -> None:
    program = """
import sys, time
import numpy as np
from penstock.storage.derived import derived_array
def write(out):
    time.sleep(0.3)
    print("written", flush=True)
    out.write(np.arange(5).tobytes())
assert derived_array("classes", "q", np.int64, write, "").tolist() == [0, 1, 2, 3, 4]
"""
    run = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert sorted(process.communicate()[0] for process in run) == ["", "", "written\n"]
    assert [process.returncode for process in run] == [0, 0, 0]


def test_an_error_of_the_writer_leaves_no_file(cache: Path) -> None:
    def write(out: BinaryIO) -> None:
        out.write(b"half")
        raise DataFileIOError("unreadable")

    with pytest.raises(DataFileIOError, match="unreadable"):
        numbers(write)
    assert list(cache.iterdir()) == []


def test_a_full_disk_leaves_the_array_in_memory(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.warns(UserWarning, match=r"\.table: the numbers cannot be stored there \(No space left on device\)"):
        assert numbers(Writer()).tolist() == NUMBERS.tolist()
    assert list(cache.iterdir()) == []
    with pytest.raises(OSError, match="No space left on device"):
        numbers(Writer(), folder=cache)


def test_a_broken_disk_is_an_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="Input/output error"):
        numbers(Writer())


def test_a_folder_of_the_user(tmp_path: Path, cache: Path) -> None:
    assert numbers(Writer(), folder=tmp_path / "own").tolist() == NUMBERS.tolist()
    assert len(list((tmp_path / "own").iterdir())) == 1
    assert not cache.exists()


def test_the_first_place_that_can_be_written(tmp_path: Path) -> None:
    missing, last = tmp_path / "missing" / "a", tmp_path / "last" / "a"

    def load(path: Path) -> bytes | None:
        return path.read_bytes() if path.exists() else None

    assert load_or_write([missing, last], load, lambda out: out.write(b"data")) == b"data"
    assert (missing.parent.exists(), last.exists()) == (False, True)
    missing.parent.mkdir()
    assert load_or_write([missing, last], load, lambda out: out.write(b"other")) == b"data"
    with pytest.raises(DataFileIOError, match="removed or replaced as soon as it was written"):
        load_or_write([tmp_path / "a"], lambda path: None, lambda out: out.write(b"data"))
