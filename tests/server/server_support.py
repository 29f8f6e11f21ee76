"""Servers in processes of their own, certificates, and manifests, for the tests of server and client."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from busy_support import HANG
from interpreter_support import SERVES, Popen

from penstock.manifest import Manifest
from penstock.order import Partition, make_order
from penstock.server import Client

_PROGRAM = """
import sys
from penstock.server import Server
file, port = sys.argv[1:]
with Server({"train": file}, port=int(port)) as server:
    print(server.address, flush=True)
    sys.stdin.read()
"""


class Process:
    """A server of one file, as "train", in a process of its own that can be killed and started again."""

    def __init__(self, file: Path, port: int = 0) -> None:
        self.file = file
        self._start(port)

    def _start(self, port: int) -> None:
        self._process = Popen(
            ["-c", _PROGRAM, str(self.file), str(port)],
            imports=SERVES,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()
        assert self.address, "the server did not start"

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """kill -9."""
        self._process.kill()
        self._process.communicate()

    def restart(self) -> None:
        """Again on the same port."""
        self._start(self.port)

    def freeze(self) -> None:
        """The process keeps its sockets and does nothing, as a machine that has lost its network. Its threads stop one
        by one, each when the system gets to it: on a busy machine the last ones may still answer for a while.
        """
        os.kill(self.pid, signal.SIGSTOP)
        while not all(map(_stopped, Path(f"/proc/{self.pid}/task").iterdir())):
            time.sleep(0.001)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        if self._process.poll() is None:
            self.thaw()
            try:
                self._process.communicate(timeout=HANG)  # closes its standard input
            except subprocess.TimeoutExpired:
                self.kill()
                raise


@contextmanager
def served(*files: Path) -> Iterator[list[Process]]:
    """One process for each file."""
    processes: list[Process] = []
    try:
        processes += [Process(file) for file in files]
        yield processes
    finally:
        for process in processes:
            process.close()


def lines(batches: Iterator[pa.RecordBatch] | list[pa.RecordBatch]) -> list[bytes]:
    """The lines of batches, in order."""
    return [line for batch in batches for line in batch.column("line").to_pylist()]


@dataclass(frozen=True, kw_only=True)
class Share:
    """Rows of one rank in an epoch, by its plan; read in pages."""

    name: str
    fingerprint: str
    samples: int
    seed: int = 0
    epoch: int = 0
    shuffle: str = "global"
    block: dict[str, int] = field(default_factory=dict)
    world_size: int = 1
    rank: int = 0
    mini_epochs: int = 1
    mini_epoch: int = 0
    remainder: str = "pad"
    begin: int = 0
    end: int | None = None
    page_rows: int = 1 << 14

    def rows(self) -> np.ndarray:
        """Numbers of the rows."""
        partition = Partition(
            self.samples,
            self.world_size,
            self.rank,
            mini_epochs=self.mini_epochs,
            mini_epoch=self.mini_epoch,
            remainder=self.remainder,
        )
        order = make_order(self.shuffle, self.samples, seed=self.seed, epoch=self.epoch, **self.block)
        positions = partition.positions(self.begin, len(partition) if self.end is None else self.end)
        return order[positions % max(self.samples, 1)]

    def pages(self) -> Iterator[np.ndarray]:
        """The same, in pages."""
        rows = self.rows()
        return (rows[begin : begin + self.page_rows] for begin in range(0, len(rows), self.page_rows))


def pages_of(client: Client, share: Share) -> Iterator[pa.RecordBatch]:
    """The pages of a share, from a server."""
    return client.batches(share.name, share.fingerprint, share.pages())


def expected(manifest: Manifest, share: Share) -> list[bytes]:
    """The lines of a share, from the file."""
    return manifest.raw(share.rows()).to_pylist()


def whole(client: Client, **options: object) -> Share:
    """A share of the only data set."""
    info = client.info()
    return Share(name=info.name, fingerprint=info.fingerprint, samples=info.rows, **options)  # type: ignore[arg-type]


def write_lines(path: Path, rows: int, mark: str = "a") -> Path:
    """Write ``rows`` lines ``a/0000000.jpg 0``."""
    path.write_text("".join(f"{mark}/{k:07d}.jpg {k % 10}\n" for k in range(rows)))
    return path


def random_rows(rows: int, count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, rows, count)


# ---------------------------------------------------------------------- certificates


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    return Authority(tmp_path_factory.mktemp("tls"))


_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")  # made faster than one of RSA


class Authority:
    """Makes certificates with the openssl command."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.roots = folder / "ca.pem"
        self._run("req", "-x509", *_KEY, "-nodes", "-keyout", "ca.key", "-out", "ca.pem",
                  "-days", "2", "-subj", "/CN=Penstock test authority",
                  "-addext", "keyUsage=critical,keyCertSign,cRLSign")  # fmt: skip

    def certificate(self, name: str, *, expired: bool = False, host: str = "IP:127.0.0.1") -> tuple[Path, Path]:
        """A certificate for loopback, and its key."""
        cert, key = self.folder / f"{name}.pem", self.folder / f"{name}.key"
        (self.folder / f"{name}.ext").write_text(f"subjectAltName={host}\n")
        self._run("req", *_KEY, "-nodes", "-keyout", key.name, "-out", f"{name}.csr", "-subj", f"/CN={name}")
        if expired:
            self._ca_database()
            self._run("ca", "-batch", "-config", "ca.cnf", "-in", f"{name}.csr", "-out", cert.name,
                      "-startdate", "20200101000000Z", "-enddate", "20210101000000Z",
                      "-extfile", f"{name}.ext", "-notext")  # fmt: skip
        else:
            self._run("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
                      "-out", cert.name, "-days", "2", "-extfile", f"{name}.ext")  # fmt: skip
        return cert, key

    def _ca_database(self) -> None:
        (self.folder / "index.txt").touch()
        (self.folder / "ca.cnf").write_text(
            "[ca]\ndefault_ca=x\n[x]\ndatabase=index.txt\nnew_certs_dir=.\ncertificate=ca.pem\nprivate_key=ca.key\n"
            "rand_serial=yes\ndefault_md=sha256\npolicy=p\nunique_subject=no\n[p]\ncommonName=supplied\n"
        )

    def _run(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self.folder, check=True, capture_output=True, timeout=HANG)


# ---------------------------------------------------------------------- between client and server


class Pipe:
    """A TCP proxy that can stop to pass anything on, without closing a connection: a network that has gone."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._open = threading.Event()
        self._open.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def address(self) -> str:
        return f"grpc://127.0.0.1:{self.port}"

    def cut(self) -> None:
        self._open.clear()

    def mend(self) -> None:
        self._open.set()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._target))
            self._sockets += [client, server]
            for pair in ((client, server), (server, client)):
                thread = threading.Thread(target=self._pump, args=pair, daemon=True)
                thread.start()
                self._threads.append(thread)

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                self._open.wait()
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def close(self) -> None:
        self._open.set()
        self._listener.close()
        for one in self._sockets:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        for thread in self._threads:
            thread.join(5)


def timed(what: object) -> float:
    """Seconds that a call takes."""
    begin = time.monotonic()
    what()  # type: ignore[operator]
    return time.monotonic() - begin


def _stopped(task: Path) -> bool:
    """Whether a thread is stopped, or over."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0] in "TtZX"
    except (FileNotFoundError, ProcessLookupError):
        return True
