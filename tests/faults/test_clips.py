"""Clips of video and sound: workers that are killed, Ctrl-C, full disks, and what a loader holds as it goes on."""

from __future__ import annotations

import os
import signal
import subprocess
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults_support import Dies, within
from interpreter_support import METHODS
from leak_support import anonymous, assert_nothing_more, left, wait_gone
from loader_support import plain
from program_support import Program
from sound_support import write_sound
from video_support import picture, write_video

import penstock as ps
from penstock.clips import decoder
from penstock.errors import DataFileIOError

FILES = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some videos, and recordings in different codecs."""
    made = tmp_path_factory.mktemp("clips")
    for number in range(FILES):
        write_video(made / f"{number}.mp4", 30, pictures=lambda frame, number=number: picture(40 * number + frame))
        write_sound(made / f"{number}.{'flac' if number % 2 else 'm4a'}", 1.0, codec="flac" if number % 2 else "aac")
    return made


def clips_of(folder: Path, kind: str, **options: Any) -> Any:
    """Clips of some frames, or some tenths of a second."""
    if kind == "video":
        return ps.VideoDataset(folder, frames=4, size=16, stride=6, seed=3, **options)
    return ps.AudioDataset(folder, seconds=0.1, stride=0.2, seed=3, **options)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["video", "sound"])
def test_a_killed_worker_is_made_good(folder: Path, tmp_path: Path, kind: str, method: str) -> None:
    """And this process decodes nothing."""
    expected = [plain(batch) for batch in ps.DataLoader(Dies(clips_of(folder, kind), set(), "SIGKILL"), 4, seed=1)]
    decoder._open.decoders.clear()
    resource_tracker.ensure_running()
    forkserver.ensure_running()
    before = left()
    data = Dies(clips_of(folder, kind), {3, 11, 12}, "SIGKILL", tmp_path)
    loader: Any = ps.DataLoader(
        data, 4, num_workers=2, multiprocessing_context=method, on_worker_death="restart", seed=1
    )
    with within(200):
        assert [plain(batch) for batch in loader] == expected
    assert loader.stats()["restarts"] >= 1
    loader.close()
    assert not decoder._open.decoders
    del loader, data
    assert_nothing_more(before)


@pytest.mark.parametrize("kind", ["video", "sound"])
def test_a_worker_that_is_killed_between_batches(folder: Path, kind: str) -> None:
    """Its readers, with open files and decoders, are made anew by another one."""
    expected = [plain(batch) for batch in ps.DataLoader(clips_of(folder, kind), 2)]
    loader: Any = ps.DataLoader(clips_of(folder, kind), 2, num_workers=2, on_worker_death="restart")
    got = []
    with within(200):
        iterator = iter(loader)
        for batch in iterator:
            got.append(plain(batch))
            if len(got) in (2, 5):
                os.kill(iterator._workers[0].pid, signal.SIGKILL)
    assert got == expected
    loader.close()


@pytest.mark.parametrize("kind", ["video", "sound"])
def test_ctrl_c(folder: Path, tmp_path: Path, kind: str) -> None:
    body = f"""
    options = dict(frames=4) if {kind!r} == "video" else dict(seconds=0.1)
    make = ps.VideoDataset if {kind!r} == "video" else ps.AudioDataset
    loader = DataLoader(make({str(folder)!r}, **options), 2, num_workers=2)
    iterator = iter(loader)
    pids(iterator)
    for number in range(10_000):
        for batch in iterator:
            pass
        iterator = iter(loader)
        pids(iterator)
        if number == 3:
            say("ready")
    """
    with Program(tmp_path, body, {}) as program:
        program.wait_for("ready")
        os.killpg(program.process.pid, signal.SIGINT)
        assert program.end(20) in (-signal.SIGINT, 130, 1)
        assert not wait_gone(program.pids, 5)
        assert program.err.count("Traceback (most recent call last)") == 1, program.err
        assert "KeyboardInterrupt" in program.err


@pytest.mark.parametrize("kind", ["video", "sound"])
def test_memory_is_flat(folder: Path, kind: str) -> None:
    dataset = clips_of(folder, kind)
    held = []
    for _ in range(4):
        for _ in range(8):
            for row in range(len(dataset)):
                dataset[row]
        held.append(anonymous())
    assert held[-1] - held[0] < 2 << 20, held


@pytest.fixture
def full(tmp_path: Path) -> Any:
    """A disk with little room."""
    made = tmp_path / "full"
    made.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(made)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a small file system")
    yield made
    subprocess.run(["umount", str(made)], check=True)


def test_an_index_on_a_full_disk(tmp_path: Path, full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    black = np.zeros((16, 16, 3), np.uint8)
    write_video(tmp_path / "long.mp4", 8000, size=(16, 16), gop=1000, pictures=lambda number: black)
    with pytest.raises(DataFileIOError, match=r"cannot be written: .*the disk is full; free some space") as raised:
        ps.VideoDataset(tmp_path / "long.mp4", index=full / "clips.index")
    assert "cache_dir" not in str(raised.value)
    assert list(full.iterdir()) == []
    monkeypatch.setenv("XDG_CACHE_HOME", str(full))
    with pytest.raises(DataFileIOError, match="pass another path with index="):
        ps.VideoDataset(tmp_path / "long.mp4")
    assert [path for path in full.rglob("*") if path.is_file() and path.stat().st_size] == []
    assert len(ps.VideoDataset(tmp_path / "long.mp4", index=tmp_path / "clips.index", stride=100)) == 80
