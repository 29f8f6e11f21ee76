"""Jobs of many ranks that read from servers, each in a thread of its own, and check every row that they get."""

from __future__ import annotations

import os
import re
import socket
import struct
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from busy_support import HANG
from interpreter_support import SERVES, Popen
from server_support import Share, pages_of

from penstock import RankDataset, RankServerDataset
from penstock.manifest import Manifest
from penstock.order import make_order
from penstock.server import Client

Rows = npt.NDArray[np.int64]


class Truth:
    """A file whose lines are all different and equally long, and what is in it, made without the code under test."""

    def __init__(self, path: Path, rows: int) -> None:
        self.path, self.rows = path, rows
        lines = [b"shard/%08d.jpg %d" % (k, k * 7919 % 10) for k in range(rows)]
        path.write_bytes(b"\n".join(lines) + b"\n")
        self.width = len(lines[0])
        self._lines = np.frombuffer(b"".join(lines), np.uint8).reshape(rows, self.width)
        self.manifest = Manifest.open(path)

    def numbers(self, batch: pa.RecordBatch) -> Rows:
        """The numbers of the rows of a batch, as they are written in them; every byte is compared."""
        column = batch.column(0)
        _, offsets, data = column.buffers()
        starts = np.frombuffer(offsets, np.int64)[column.offset : column.offset + len(column) + 1]
        assert (np.diff(starts) == self.width).all(), "lines that are not whole"
        text = np.frombuffer(data, np.uint8)[starts[0] : starts[-1]].reshape(-1, self.width)
        numbers = (text[:, 6:14].astype(np.int64) - ord("0")) @ (10 ** np.arange(7, -1, -1))
        assert numbers.min() >= 0
        assert numbers.max() < self.rows
        assert np.array_equal(text, self._lines[numbers]), "lines that are not in the file"
        return numbers


class Job:
    """Ranks that read epoch after epoch, together, until time is over.

    Args:
        truth: what is served.
        addresses: by whom.
        seed, world_size, mini_epochs, remainder: of the job.
        seconds: after which no epoch begins any more.
        timeout: of the clients' calls.
        how: by rank in turn: "pages" (several requests under way), "rows" (in batches of 64) or "dataset".
    """

    def __init__(
        self,
        truth: Truth,
        addresses: list[str],
        *,
        seed: int,
        world_size: int,
        mini_epochs: int = 1,
        remainder: str = "pad",
        seconds: float,
        timeout: float = 10.0,
        how: tuple[str, ...] = ("pages", "rows", "dataset"),
    ) -> None:
        self.truth, self.seed, self.world_size = truth, seed, world_size
        self.mini_epochs, self.remainder = mini_epochs, remainder
        self._addresses, self._timeout = addresses, timeout
        self._end, self._more = time.monotonic() + seconds, True
        self.epoch = 0
        """Epochs that are complete, and right."""
        self.longest = 0.0
        """Seconds that a rank waited for rows at the most."""
        self._waiting: dict[int, float] = {}  # by thread: since when
        self._had = np.zeros(truth.rows, np.int64)
        self._lock = threading.Lock()
        self._errors: list[BaseException] = []
        self._barrier = threading.Barrier(world_size, self._check, timeout=60)
        self._threads = [
            threading.Thread(target=self._rank, args=(rank, how[rank % len(how)]), name=f"job {seed}, rank {rank}")
            for rank in range(world_size)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def __repr__(self) -> str:
        return f"{self.world_size} ranks: {self.epoch} epochs, longest wait {self.longest:.2f} s"

    @property
    def running(self) -> bool:
        return any(thread.is_alive() for thread in self._threads)

    def waits_since(self, moment: float) -> bool:
        """Whether a rank that waited for rows at this moment (`time.monotonic`) still does."""
        return any(since < moment for since in list(self._waiting.values()))

    def join(self) -> None:
        """Wait for the end; raises what a rank raised."""
        for thread in self._threads:
            thread.join(180)
            assert not thread.is_alive(), f"{thread.name} hangs"
        errors = [error for error in self._errors if not isinstance(error, threading.BrokenBarrierError)]
        if errors or self._errors:
            raise (errors or self._errors)[0]

    def expected(self) -> Rows:
        """How often each row comes in this epoch: once, and those once more that fill up the last round of ranks."""
        rows, parts = self.truth.rows, self.world_size * self.mini_epochs
        often = np.ones(rows, np.int64)
        if self.remainder == "pad":
            order = make_order("global", rows, seed=self.seed, epoch=self.epoch)
            np.add.at(often, order[np.arange(-(-rows // parts) * parts - rows)], 1)
        return often

    def _check(self) -> None:
        """Between epochs, by one of the ranks while the others wait."""
        wrong = np.flatnonzero(self._had != self.expected())
        assert not wrong.size, f"epoch {self.epoch}: {wrong.size} wrong; row {wrong[0]}: {self._had[wrong[0]]} times"
        self._had[:] = 0
        self.epoch += 1
        self._more = time.monotonic() < self._end

    def _rank(self, rank: int, how: str) -> None:
        try:
            with Client(self._addresses, timeout=self._timeout) as client:
                read = {"pages": self._pages, "rows": self._by_number, "dataset": self._dataset}[how](client, rank)
                while self._more:
                    had = np.bincount(np.concatenate(list(self._timed(read()))), minlength=self.truth.rows)
                    with self._lock:
                        self._had += had
                    self._barrier.wait()
        except BaseException as error:
            error.add_note(f"{threading.current_thread().name}, {how}, epoch {self.epoch}")
            traceback.clear_frames(error.__traceback__)  # what it has open would be found by other tests
            self._errors.append(error)
            self._barrier.abort()

    def _timed(self, batches: Iterator[Rows]) -> Iterator[Rows]:
        while True:
            before = self._waiting[threading.get_ident()] = time.monotonic()
            try:
                batch = next(batches, None)
            finally:
                del self._waiting[threading.get_ident()]
            self.longest = max(self.longest, time.monotonic() - before)
            if batch is None:
                return
            yield batch

    def _parts(self, rank: int) -> Iterator[Share]:
        for mini_epoch in range(self.mini_epochs):
            yield Share(
                name="train",
                fingerprint=self.truth.manifest.fingerprint,
                samples=self.truth.rows,
                seed=self.seed,
                epoch=self.epoch,
                world_size=self.world_size,
                rank=rank,
                mini_epochs=self.mini_epochs,
                mini_epoch=mini_epoch,
                remainder=self.remainder,
                page_rows=256,
            )

    def _pages(self, client: Client, rank: int) -> Callable[[], Iterator[Rows]]:
        def read() -> Iterator[Rows]:
            for part in self._parts(rank):
                for batch in pages_of(client, part):
                    yield self.truth.numbers(batch)

        return read

    def _by_number(self, client: Client, rank: int) -> Callable[[], Iterator[Rows]]:
        def read() -> Iterator[Rows]:
            for part in self._parts(rank):
                for wanted in replace(part, page_rows=64).pages():
                    numbers = self.truth.numbers(client.rows("train", part.fingerprint, wanted))
                    assert np.array_equal(numbers, wanted)
                    yield numbers

        return read

    def _dataset(self, client: Client, rank: int) -> Callable[[], Iterator[Rows]]:
        options = {"world_size": self.world_size, "rank": rank, "seed": self.seed}
        options |= {"mini_epochs": self.mini_epochs, "remainder": self.remainder}
        served = RankServerDataset(client, page_rows=128, **options)
        local = RankDataset(self.truth.manifest, **options)

        def read() -> Iterator[Rows]:
            for dataset in (served, local):
                dataset.set_epoch(self.epoch)
            for mini_epoch in range(self.mini_epochs):
                for dataset in (served, local):
                    dataset.set_mini_epoch(mini_epoch)
                for begin in range(0, len(local), 64):
                    indices = range(begin, min(begin + 64, len(local)))
                    items = served.__getitems__(indices)
                    assert items == local.__getitems__(indices)
                    yield np.array([row for _, _, row in items])

        return read


# ---------------------------------------------------------------------------------------------------------- processes


class Serve:
    """``penstock serve`` of one file, as "train", that can be killed and started again on the same port."""

    def __init__(self, file: Path, *arguments: str, alone: bool = False) -> None:
        self._alone = alone
        self._command = ["-m", "penstock", "serve", "--name", f"train={file}", *arguments]
        self._port = 0
        self.start()

    def start(self) -> None:
        self._process = Popen(
            [*self._command, "--port", str(self._port)],
            imports=SERVES,
            alone=self._alone,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "100"},
        )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().split()[-1]
        self._port = int(self.address.rpartition(":")[2])

    @property
    def port(self) -> int:
        return self._port

    @property
    def pid(self) -> int:
        return self._process.pid

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def wait(self) -> None:
        """Until it has ended."""
        self._process.communicate(timeout=HANG)

    def kill(self) -> None:
        """kill -9."""
        self._process.kill()
        self._process.communicate()

    def close(self) -> None:
        """Stop it as a person would."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                assert self._process.wait(30) == 0
            finally:
                self.kill()


@contextmanager
def serving_many(*files: Path, alone: bool = False) -> Iterator[list[Serve]]:
    """One process for each file; ``alone`` in an interpreter that has imported nothing else (`interpreter_support`)."""
    servers: list[Serve] = []
    try:
        servers += [Serve(file, alone=alone) for file in files]
        yield servers
    finally:
        for server in servers:
            server.close()


def anonymous(pid: int) -> float:
    """Anonymous memory of a process in MiB."""
    found = re.search(r"^Anonymous:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) / 1024


def descriptors(pid: int) -> int:
    """Open files and sockets of a process."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


# --------------------------------------------------------------------------------------------------- a bad connection


class Breaking:
    """A TCP proxy that resets each connection after so many bytes of the server's, until there are no numbers left."""

    def __init__(self, target: int, after: list[int]) -> None:
        self._target, self._after = target, after
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"grpc://127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._target))
            left = self._after.pop(0) if self._after else None
            for pair in ((client, server, None), (server, client, left)):
                self._threads.append(threading.Thread(target=self._pump, args=pair, daemon=True))
                self._threads[-1].start()

    def _pump(self, source: socket.socket, target: socket.socket, left: int | None) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 14):
                if left is not None:
                    data, left = data[:left], left - len(data)
                target.sendall(data)
                if left is not None and left <= 0:
                    target.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, no end
                    break
        for one in (source, target):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(5)
