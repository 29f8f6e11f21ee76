"""The cache folder, atomic writes and locks."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.storage import cache_root, file_lock, is_writable, write_atomically

RunPython = Callable[..., subprocess.CompletedProcess[str]]


def test_the_cache_folder_follows_xdg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_root() == tmp_path / "x" / "penstock"
    assert cache_root().is_dir()
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_root() == tmp_path / "home" / ".cache" / "penstock"


def test_without_a_home_the_temporary_folder_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert cache_root() == tmp_path / f"penstock-{os.getuid()}"
    if os.getuid() == 0:
        os.chown(cache_root(), 65534, 65534)
        with pytest.raises(PermissionError, match="belongs to another user"):
            cache_root()


def test_the_cache_folder_is_its_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    before = os.umask(0o022)
    try:
        assert cache_root().stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)


def test_a_link_in_the_temporary_folder_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "mine").mkdir()
    (tmp_path / f"penstock-{os.getuid()}").symlink_to(tmp_path / "mine")
    with pytest.raises(PermissionError, match="is a link"):
        cache_root()


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with write_atomically(path) as out:
        out.write(b"ne")
        assert path.read_bytes() == b"old"
        out.write(b"w")
    assert path.read_bytes() == b"new"
    with pytest.raises(ZeroDivisionError), write_atomically(path) as out:
        out.write(b"half")
        1 / 0  # noqa: B018
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file"]


def test_a_device_does_not_become_a_file(tmp_path: Path) -> None:
    """A pipe here, since a test should not try it on /dev/null."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    for other in (path, tmp_path):
        with pytest.raises(OSError, match="a folder, device or pipe"), write_atomically(other) as file:
            file.write(b"text")
    assert stat.S_ISFIFO(path.stat().st_mode)
    assert [found.name for found in tmp_path.iterdir()] == ["pipe"]


def test_written_files_are_for_everybody_that_the_umask_allows(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with write_atomically(tmp_path / "file") as out:
            out.write(b"")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


def test_what_was_abandoned_is_removed(tmp_path: Path) -> None:
    old, fresh = tmp_path / ".file.00000000.tmp", tmp_path / ".file.11111111.tmp"
    old.touch()
    fresh.touch()
    os.utime(old, ns=(0, 0))
    with write_atomically(tmp_path / "file"):
        pass
    assert sorted(os.listdir(tmp_path)) == [fresh.name, "file"]


def test_a_lock_ends_with_its_process(tmp_path: Path, run_python: RunPython) -> None:
    program = "import sys, os; from penstock.storage import file_lock; file_lock(sys.argv[1]).acquire(); os._exit(0)"
    run_python(program, tmp_path / "x")
    with file_lock(tmp_path / "x").acquire(timeout=5):
        assert "locks" in os.listdir(cache_root())
    assert os.listdir(tmp_path) == []


def test_writable_folders(tmp_path: Path) -> None:
    assert is_writable(tmp_path)
    assert not is_writable(tmp_path / "none")
    (tmp_path / "file").touch()
    assert not is_writable(tmp_path / "file")
