"""Servers and helpers for the tests of data sets over a server."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from interpreter_support import SERVES, Popen

from penstock import Manifest
from penstock.manifest import Record
from penstock.server import Observer

SHUFFLES: dict[str, dict[str, Any]] = {
    "global": {},
    "none": {"shuffle": "none"},
    "block": {"shuffle": "block", "block_size": 3, "window": 2},
    "group": {"group": 4},
}

_PROGRAM = """
import sys
from penstock.server import Server
port, *files = sys.argv[1:]
with Server(dict(pair.split("=", 1) for pair in files), port=int(port)) as server:
    print(server.address, flush=True)
    sys.stdin.readline()
    server.close(grace=1)  # readers that a failed test left do not hold it up
"""


@contextmanager
def serving(port: int = 0, **files: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    """A server in a process of its own, which does not mind what this one does: its address, and what kills it."""
    arguments = [str(port), *(f"{name}={path}" for name, path in files.items())]
    with Popen(
        ["-c", _PROGRAM, *arguments],
        imports=SERVES,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip(), lambda: (process.kill(), process.wait(20), None)[-1]
        finally:
            # A line, since forked workers that still run keep the other end of the pipe open.
            with suppress(BrokenPipeError):
                process.stdin.write("\n")
                process.stdin.close()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                raise


class Counting(Observer):
    """An observer that counts: streams and messages of rows."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.streams = self.open = self.messages = self.sent = 0
        self.errors: list[str] = []
        self.sizes: list[tuple[int, int]] = []

    def stream_started(self, name: str, peer: str) -> None:
        with self._lock:
            self.streams += 1
            self.open += 1

    def stream_ended(self, name: str, peer: str, error: str | None) -> None:
        with self._lock:
            self.open -= 1

    def rows(self, name: str, count: int, nbytes: int) -> None:
        with self._lock:
            self.messages += 1
            self.sizes.append((count, nbytes))
            self.sent += count

    def error(self, name: str | None, kind: str) -> None:
        with self._lock:
            self.errors.append(kind)


def eventually(what: Callable[[], object], seconds: float = 10) -> None:
    """Wait until something holds."""
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "did not come about"
        time.sleep(0.01)


def whole(record: Record) -> Record:
    """``load=`` for all that there is of a record."""
    return record


def write_kinds(folder: Path) -> dict[str, Manifest]:
    """Manifests of every format, with odd values in them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = range(50)
    (folder / "text.txt").write_text("".join(f"dir {i}/img {i}.jpg {i - 20}\n" for i in rows))
    (folder / "odd.txt").write_bytes(b"".join(b"caf\xe9 %d.jpg %d\n\n" % (i, i) for i in rows))
    (folder / "table.csv").write_text("path,label,score,note\n" + "".join(f'"a,{i}",{i},{i / 3},ü{i}\n' for i in rows))
    (folder / "lines.jsonl").write_text(
        "".join(f'{{"path": "p{i}", "label": [{i}, {-i}], "any": {{"k": [{i}, null]}}}}\n' for i in rows)
    )
    table = pa.table({"path": [f"q{i}" for i in rows], "label": list(rows), "weight": [i * 0.5 for i in rows]})
    pq.write_table(table, folder / "table.parquet")
    opened = {
        "text": Manifest.open(folder / "text.txt", root="/data/images"),
        "odd": Manifest.open(folder / "odd.txt"),
        "unlabelled": Manifest.open(folder / "text.txt", label=None),
        "csv": Manifest.open(folder / "table.csv", columns=["path", "label", "score:float", "note:str"]),
        "jsonl": Manifest.open(folder / "lines.jsonl", label="int[2]", columns=["path", "label:int[2]", "any"]),
        "parquet": Manifest.open(folder / "table.parquet", columns=["path", "label", "weight"], root="/data"),
        "several": Manifest.open([folder / "text.txt", folder / "odd.txt"]),
    }
    return {**opened, "view": opened["text"][5:40:2]}
