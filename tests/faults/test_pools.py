"""Commands that work in several processes and are killed: nothing of them is left, in whatever state they were."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
from busy_support import HANG
from full_run import full_only
from interpreter_support import Popen
from leak_support import alive, wait_gone

from penstock.storage import file_lock

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sessions are looked up in /proc")

T = TypeVar("T")


def eventually(look: Callable[[], T | None], process: subprocess.Popen[str]) -> T:
    """What is there in time, while a process runs."""
    deadline = time.monotonic() + HANG
    while (found := look()) is None:
        assert process.poll() is None, "it has ended"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return found


def session(leader: int) -> list[int]:
    """The processes of a session that run, fork server and resource tracker included."""
    found = [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()]
    return [pid for pid in found if alive(pid) and _session_of(pid) == leader]


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def writer_of(fifo: Path) -> int | None:
    """The end that is written to, once somebody reads from the other one, and waits as long as this is open."""
    try:
        return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return None


def commands(leader: int) -> Iterator[list[bytes]]:
    """Yield the command line of each process of a session."""
    for pid in session(leader):
        with suppress(OSError):
            yield Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")


def begins_a_worker(leader: int) -> bool | None:
    """True once the fork server has forked."""
    servers = sum(any(b"forkserver" in argument for argument in command) for command in commands(leader))
    return True if servers > 1 else None


def attaches(leader: int) -> bool | None:
    """True once the process that attaches to Ray runs: it is told whose it is. ``uname`` runs for a moment before."""
    return True if any(str(leader).encode() in command for command in commands(leader)) else None


@contextmanager
def running(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """``penstock ...`` in a session of its own."""
    with (folder / "output").open("w") as output:
        options = {"cwd": folder, "stdout": output, "stderr": output, "start_new_session": True}
        process = Popen(["-m", "penstock", *arguments], **options)
    try:
        yield process
    finally:
        for pid in {process.pid, *session(process.pid)}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(HANG)


def assert_nothing_is_left(process: subprocess.Popen[str]) -> None:
    """Kill it and wait for the others of its session, which have to end by themselves."""
    there = session(process.pid)
    assert len(there) > 1
    process.kill()
    process.wait(HANG)
    assert not wait_gone(there, HANG)
    assert not session(process.pid)


@full_only("a program for each", but=["workers are busy"])
@pytest.mark.parametrize("when", ["workers start", "workers are busy", "a worker waits for work"])
def test_nothing_is_left_of_a_killed_packing(when: str, tmp_path: Path) -> None:
    """Reading from a pipe that nobody writes to keeps a worker busy."""
    pipes = [tmp_path / "a.txt", tmp_path / "b.txt"]
    if when == "a worker waits for work":
        pipes.pop().write_bytes(b"a short text")
    for pipe in pipes:
        os.mkfifo(pipe)
    (tmp_path / "list.txt").write_text("a.txt 0\nb.txt 1\n")
    pack = ["shards", "pack", "list.txt", "shards", "--root", ".", "--maxcount", "1", "--workers", "2"]
    with ExitStack() as stack:
        process = stack.enter_context(running(tmp_path, *pack))
        if when == "workers start":
            eventually(lambda: begins_a_worker(process.pid), process)
        else:
            for pipe in pipes:
                stack.callback(os.close, eventually(partial(writer_of, pipe), process))
        if when == "a worker waits for work":
            done = tmp_path / "shards/train-000001.tar.pidx"
            eventually(lambda: done.exists() or None, process)
        assert_nothing_is_left(process)


def test_nothing_is_left_of_a_killed_indexing(tmp_path: Path) -> None:
    """Whoever else indexes a shard is waited for."""
    shards = [tmp_path / "a.tar", tmp_path / "b.tar"]
    with ExitStack() as stack:
        for shard in shards:
            shard.write_bytes(bytes(1024))
            stack.enter_context(file_lock(f"{shard}.pidx"))
        process = stack.enter_context(running(tmp_path, "shards", "index", *map(str, shards), "--workers", "2"))
        eventually(lambda: begins_a_worker(process.pid), process)
        assert_nothing_is_left(process)


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray")
def test_nothing_is_left_of_a_killed_diagnosis(tmp_path: Path) -> None:
    """A process of its own attaches to Ray. Here it waits for somebody who takes the call and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent, ExitStack() as stack:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        process = stack.enter_context(running(tmp_path, "doctor", "--ray", address))
        eventually(lambda: attaches(process.pid), process)
        assert_nothing_is_left(process)
