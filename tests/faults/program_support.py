"""Programs that are watched from outside, for the tests of faults."""

from __future__ import annotations

import os
import signal
import subprocess
import textwrap
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from busy_support import slowness
from faults_support import ORPHAN_GRACE_S
from interpreter_support import Popen

HERE = Path(__file__).parent

PROGRAM = """
import ctypes, gc, os, signal, sys, threading, time
import multiprocessing
sys.path[:0] = {path!r}
multiprocessing.set_forkserver_preload(["penstock.loader.dataloader", "faults_support"])
{patience}import torch
import penstock as ps
from penstock import DataLoader
from faults_support import *
from leak_support import children
def say(*words):
    print(*words, flush=True)
def pids(*iterators):
    say("pids", *[worker.pid for iterator in iterators for worker in iterator._workers])
how = {how!r}
if __name__ == "__main__":
{body}
"""


class Program:
    """A program in a session of its own, whose output goes to files: who inherits a pipe would keep it open."""

    def __init__(
        self, folder: Path, body: str, how: dict[str, Any], *, by_themselves: bool = False, **options: Any
    ) -> None:
        """With ``by_themselves`` no worker is ended by force when the program has died: it has ten minutes."""
        patience = f"os.environ[{ORPHAN_GRACE_S!r}] = '600'\n" if by_themselves else ""
        path = [str(HERE), str(HERE.parent / "loader"), str(HERE.parent.parent / "src")]
        self._files = folder / "out", folder / "err"
        script = folder / "program.py"
        body = textwrap.indent(textwrap.dedent(body), "    ")
        script.write_text(PROGRAM.format(patience=patience, path=path, how=how, body=body))
        with self._files[0].open("w") as out, self._files[1].open("w") as err:
            self.process = Popen(
                ["-W", "ignore", str(script)], stdout=out, stderr=err, start_new_session=True, **options
            )

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *exc: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)

    @property
    def out(self) -> str:
        return self._files[0].read_text()

    @property
    def err(self) -> str:
        return self._files[1].read_text()

    @property
    def pids(self) -> list[int]:
        """Of the workers that the program told of."""
        return [int(pid) for line in self.out.splitlines() if line.startswith("pids") for pid in line.split()[1:]]

    def wait_for(self, word: str, seconds: float = 40) -> None:
        """Until the program has said this."""
        deadline = time.monotonic() + seconds
        while word not in self.out.split():
            assert self.process.poll() is None, self.err
            assert time.monotonic() < deadline, f"not a word of {word!r}: {self.out!r} {self.err!r}"
            time.sleep(0.02)

    def end(self, seconds: float = 30) -> int:
        """Its exit code. On a busy machine it has longer."""
        with suppress(subprocess.TimeoutExpired):
            return self.process.wait(seconds)
        return self.process.wait(seconds * (slowness() - 1))

    def group(self) -> list[int]:
        """Processes of its session that run; the forkserver and its like are not counted."""
        found = []
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            try:
                fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
                words = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            helper = b"resource_tracker" in words
            if int(fields[3]) == self.process.pid and fields[0] not in "ZX" and not helper:
                found.append(int(folder.name))
        return found
