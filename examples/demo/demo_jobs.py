"""Training jobs of the demo: real processes, none of which outlives its `Fleet`.

Waiting is not polling: one thread per process waits for its end and puts it into a queue.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from penstock.errors import PenstockError

__all__ = ["Fleet", "Job"]

_DEADLINE = 600.0  # seconds without any process coming to its end
_DEADLINE_AFTER_FAILURE = 10.0  # for the other ranks, once one has failed


@dataclass
class Job:
    """One training job: a program started once per rank.

    ``name`` is unique; the error output of rank R goes to ``folder/name.rankR.log``, and so does its output unless
    `shown`. A job that `dies` is expected to end by SIGKILL, any other one with exit code 0.
    """

    name: str
    program: Path
    arguments: Sequence[str]
    folder: Path
    ranks: int = 1
    dies: bool = False
    shown: bool = False
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.left = self.ranks
        self.failed = False
        self.over = False

    def log(self, rank: int) -> Path:
        """The file of what a rank writes to standard error, and of its output where that is not shown."""
        return self.folder / f"{self.name}.rank{rank}.log"

    def last_words(self) -> str:
        """The end of what the ranks wrote: where one has failed, the others tell of a lost connection only."""
        lines = []
        for rank in range(self.ranks):
            log = self.log(rank)
            lines += log.read_text(errors="replace").strip().splitlines()[-8:] if log.exists() else []
        return "\n".join(["", *lines]) if lines else f"it wrote nothing to {self.log(0)}"


class Fleet:
    """Starts jobs, waits for them, and kills what is left of them when it is closed.

    >>> with Fleet() as fleet:             # doctest: +SKIP
    ...     fleet.start(job)
    ...     fleet.wait()
    """

    def __init__(self) -> None:
        self._ended: queue.SimpleQueue[tuple[Job, int, int | OSError]] = queue.SimpleQueue()
        self._running: list[Job] = []
        self._lock = threading.Lock()  # a process is started and noted, or a job declared over: never both halfway

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for job in self._running:
            self._kill(job)

    def start(self, job: Job) -> None:
        """Start all ranks of a job. They meet at a file, so that no port has to be free."""
        job.folder.mkdir(parents=True, exist_ok=True)
        (job.folder / f"{job.name}.rendezvous").unlink(missing_ok=True)
        self._running.append(job)
        for rank in range(job.ranks):
            threading.Thread(target=self._run, args=(job, rank), daemon=True).start()

    def _run(self, job: Job, rank: int) -> None:
        """One rank from its start to its end. In a thread of its own, also since signals do not interrupt those: a
        Ctrl-C cannot come between the start of a process and the note that it is there."""
        with self._lock:
            if job.over:
                return
            try:
                process = _start(job, rank)
            except OSError as error:
                self._ended.put((job, rank, error))
                return
            job.processes.append(process)
        self._ended.put((job, rank, process.wait()))

    def wait(self) -> Job:
        """Wait until one of the running jobs has ended as it should; the first rank that dies takes the others along.

        Raises:
            PenstockError: a rank failed (with the end of what the ranks wrote), or none ends for ten minutes.
        """
        while True:
            job, rank, code = self._next_end()
            if job not in self._running:
                continue  # killed together with the first rank that died
            if isinstance(code, OSError):
                raise PenstockError(f"rank {rank} of {job.name} cannot be started: {code}") from code
            job.left -= 1
            if job.dies and code == -signal.SIGKILL:
                self._kill(job)
            elif code != 0 and not job.dies:
                raise PenstockError(f"rank {rank} of {job.name} ended with exit code {code}: {job.last_words()}")
            elif job.left > 0:
                job.failed = code != 0  # if so, for want of a rank that was killed: its end will be the next to come
                continue
            elif job.dies:
                raise PenstockError(f"{job.name} came to its end before it was killed: {job.last_words()}")
            self._running.remove(job)
            return job

    def _next_end(self) -> tuple[Job, int, int | OSError]:
        failed = next((job for job in self._running if job.failed), None)
        seconds = _DEADLINE if failed is None else _DEADLINE_AFTER_FAILURE
        try:
            return self._ended.get(timeout=seconds)
        except queue.Empty:
            job = failed or self._running[0]
            raise PenstockError(f"{job.name} does not come to its end: {job.last_words()}") from None

    def _kill(self, job: Job) -> None:
        with self._lock:
            job.over = True
        for process in job.processes:
            process.kill()
        for process in job.processes:
            process.wait()


def _start(job: Job, rank: int) -> subprocess.Popen[bytes]:
    rendezvous = job.folder / f"{job.name}.rendezvous"
    command = [sys.executable, str(job.program), *job.arguments, "--rendezvous", str(rendezvous)]
    environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(job.ranks), "OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host name that does not resolve would stop gloo
    with job.log(rank).open("wb") as log:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=None if job.shown and rank == 0 else log,
            stderr=log,
            start_new_session=True,  # Ctrl-C reaches us alone; we end them
        )
