"""Scans of files in processes of their own: what is wrong with a file stays there, and no process is left."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from busy_support import HANG
from interpreter_support import Popen, run
from leak_support import children
from video_support import write_video

from penstock.clips import scan_process
from penstock.clips.indexing import open_index
from penstock.clips.media import open_file
from penstock.clips.scan import scan
from penstock.clips.scan_process import ScanProcesses
from penstock.errors import ClipError, ConfigError, DataFileIOError, StorageNotFoundError, StorageUnavailableError


@pytest.fixture
def processes() -> Iterator[ScanProcesses]:
    """Those that scan videos; none is left."""
    before = children()
    with ScanProcesses("scan") as made:
        yield made
    assert children() <= before


class Watched:
    """The bytes of a file, which does something whenever they are asked for."""

    fingerprint = ""

    def __init__(self, path: Path, act: Any) -> None:
        self._source, self._act = open_file(str(path), None), act
        self.size = self._source.size

    def read_at(self, offset: int, size: int) -> bytes:
        self._act()
        return self._source.read_at(offset, size)


def test_it_is_what_a_scan_in_this_process_makes(processes: ScanProcesses, tmp_path: Path) -> None:
    path = write_video(tmp_path / "a.mp4", 60)
    source = open_file(str(path), None)
    here, there = scan(source, str(path)), processes.scan(source, str(path))
    assert here.coding == there[0]
    assert all(np.array_equal(*pair) for pair in zip(here.packets, there[1], strict=True))


def test_threads_have_a_process_each_and_use_it_again(processes: ScanProcesses, tmp_path: Path) -> None:
    path, before, seen = write_video(tmp_path / "a.mp4"), children(), set()
    meeting = threading.Barrier(2, timeout=HANG)

    def work() -> None:
        for number in range(3):
            started = [meeting.wait] if not number else []
            processes.scan(Watched(path, lambda started=started: [one() for one in started[:1]]), str(path))
            started.clear()
            seen.update(children() - before)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 2


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV])
def test_one_that_ends(processes: ScanProcesses, tmp_path: Path, times: int, how: signal.Signals) -> None:
    """The file is scanned once more; if that process ends, too, it is the file's fault, unless somebody kills them."""
    path, before, kills = write_video(tmp_path / "a.mp4"), children(), [how] * times

    def kill() -> None:
        if kills:
            (process,) = children() - before
            os.kill(process, kills.pop())

    if times == 1:
        assert processes.scan(Watched(path, kill), "a.mp4")[1].times.shape == (48,)
    else:
        error = DataFileIOError if how == signal.SIGKILL else ClipError
        with pytest.raises(error, match=rf"'a\.mp4' cannot be indexed: .* has ended \({how.name}\), 2 times"):
            processes.scan(Watched(path, kill), "a.mp4")
    assert not kills
    assert processes.scan(open_file(str(path), None), "a.mp4")[1].times.shape == (48,)


@pytest.mark.parametrize("error", [StorageNotFoundError, StorageUnavailableError])
def test_an_error_of_the_source_is_raised_here(
    processes: ScanProcesses, tmp_path: Path, error: type[Exception]
) -> None:
    path = write_video(tmp_path / "a.mp4")

    def fail() -> None:
        raise error("gone")

    with pytest.raises(error, match="gone"):
        processes.scan(Watched(path, fail), "a.mp4")
    assert processes.scan(open_file(str(path), None), "a.mp4")[1].times.shape == (48,)


def test_leaving_ends_what_is_still_scanned(tmp_path: Path) -> None:
    path, asked, goes_on = write_video(tmp_path / "a.mp4"), threading.Event(), threading.Event()
    before, raised = children(), []

    def wait() -> None:
        asked.set()
        goes_on.wait(HANG)

    def work(processes: ScanProcesses) -> None:
        try:
            processes.scan(Watched(path, wait), "a.mp4")
        except (ClipError, ConfigError) as error:
            raised.append(error)

    with ScanProcesses("scan") as processes:
        thread = threading.Thread(target=work, args=[processes])
        thread.start()
        assert asked.wait(HANG)
    goes_on.set()
    thread.join(HANG)
    assert len(raised) == 1
    assert children() <= before


def test_a_file_that_takes_too_long(tmp_path: Path) -> None:
    black = np.zeros((16, 16, 3), np.uint8)
    short = write_video(tmp_path / "short.h264", 100, size=(16, 16), gop=100, pictures=lambda number: black)
    (tmp_path / "long.h264").write_bytes(short.read_bytes() * 4000)
    long = open_file(str(tmp_path / "long.h264"), None)
    with ScanProcesses("scan", seconds=-(long.size // 100_000)) as processes:
        with pytest.raises(ClipError, match=r"'long\.h264' cannot be indexed: that takes more than 0 s"):
            processes.scan(long, "long.h264")
        assert processes.scan(open_file(str(short), None), "short.h264")[1].times.shape == (100,)


def hostile(path: Path, samples: int) -> Path:
    """A small MP4 that says it has so many frames."""
    data = bytearray(write_video(path, 12, options={"bf": "0"}).read_bytes())
    struct.pack_into(">II", data, data.find(b"stsz") + 8, 1, samples)
    struct.pack_into(">II", data, data.find(b"stts") + 12, samples, 512)
    struct.pack_into(">III", data, data.find(b"stsc") + 12, 1, samples, 1)
    path.write_bytes(data)
    return path


def test_memory_is_limited(tmp_path: Path) -> None:
    """In this process nothing is taken, and in the other one no more than there is room for."""
    for number, samples in enumerate((10**6, 5 * 10**7, 2 * 10**9)):
        hostile(tmp_path / f"{number}.mp4", samples)
    whole = write_video(tmp_path / "whole.mp4")
    program = """
import json, resource, sys
from penstock.clips.indexing import open_index
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
index = open_index(sys.argv[2:], sys.argv[1])
own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(json.dumps([own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, index.column("error")]))
"""
    paths = [*(str(tmp_path / f"{number}.mp4") for number in range(3)), str(whole)]
    done = run(["-c", program, str(tmp_path / "index"), *paths], timeout=HANG, alone=True)
    assert done.returncode == 0, done.stderr
    own, theirs, errors = json.loads(done.stdout)
    assert own < 50 << 10
    assert theirs < 1300 << 10
    assert errors[3] == ""
    assert "2.mp4" in errors[2]


PROGRAM = """
import os, sys, time
from leak_support import children
from penstock.clips import indexing, media
class Slow:
    fingerprint = ""
    def __init__(self, source):
        self.size = source.size
    def read_at(self, offset, size):
        print(*children(), flush=True)
        time.sleep(4)
opened = media.open_file
indexing.open_file = lambda name, storage: Slow(opened(name, storage))
try:
    indexing.open_index([sys.argv[1]], sys.argv[2])
except KeyboardInterrupt:
    print("caught", *children(), flush=True)
    os._exit(3)
"""
"""Indexes a file that is never read to its end."""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_processes_end_with_the_one_that_indexes(tmp_path: Path, how: signal.Signals) -> None:
    path = write_video(tmp_path / "a.mp4")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1] / "loader")])}
    arguments = ["-c", PROGRAM, str(path), str(tmp_path / "index")]
    with Popen(
        arguments, env=environment, alone=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 1
        os.killpg(process.pid, how)
        out, err = process.communicate(timeout=HANG)
    deadline = time.monotonic() + HANG
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert not (tmp_path / "index").exists()
    if how == signal.SIGINT:
        assert (out, err) == ("caught\n", "")


HALF = """
import os, signal, struct
os.write({fd}, struct.pack("!i", 1 << 20) + b"half")
os.kill(os.getpid(), signal.SIGSEGV)
"""


def test_one_that_ends_in_its_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_process, "_PROGRAM", HALF)
    path = write_video(tmp_path / "a.mp4")
    with ScanProcesses("scan") as processes, pytest.raises(ClipError, match="SIGSEGV"):
        processes.scan(open_file(str(path), None), "a.mp4")


def test_one_that_cannot_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is no fault of a file, and nothing is kept."""
    (tmp_path / "av").mkdir()
    (tmp_path / "av/__init__.py").write_text("raise ImportError('libavcodec.so.99')")
    path = write_video(tmp_path / "a.mp4")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"PyAV cannot be imported .*libavcodec\.so\.99"):
        open_index([str(path)], tmp_path / "index")
    assert not (tmp_path / "index").exists()


def test_one_that_cannot_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_video(tmp_path / "a.mp4")
    monkeypatch.setattr(scan_process, "get_executable", lambda: str(tmp_path / "nothing"))
    with pytest.raises(DataFileIOError, match="a process that scans files cannot be started"):
        open_index([str(path)], tmp_path / "index")
