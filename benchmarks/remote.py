"""Training data in an object store beside other libraries: the first batch, cold and warm epochs, bytes, faults.

The same JPEGs are packed in each library's format and served by one store on 127.0.0.1 (tests/support/store_server.py)
with the same latency before each answer. Each peer runs in a fresh process with an empty cache (_remote_peers.py), and
delivers the bytes of all samples in batches of 64 with two workers: a cold epoch, then a warm one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import selectors
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from store_server import Store

from _common import folder, parse, spread, table
from _remote_files import write_parquet
from _remote_peers import PEERS
from shards import cifar

_HERE = Path(__file__).parent
_VERSIONS = ["webdataset", "mosaicml-streaming", "litdata", "datasets", "torch"]
_FAULTY = [name for name in PEERS if name not in ("WebDataset, cache", "datasets, tar")]


class FailedError(Exception):
    """A peer ended, or took too long."""


@dataclass
class Epoch:
    """What one epoch took, seen by the peer and by the store."""

    seconds: float
    samples: int
    digest: int
    longest: float
    requests: int
    bytes: int


@dataclass
class Run:
    """What a peer did in a fresh process: its epochs, or why it failed."""

    first: float = 0.0
    epochs: list[Epoch] = field(default_factory=list)
    cpu: float = 0.0
    disk: int = 0
    failed: str = ""


class Process:
    """A peer's process. Each answer has a deadline."""

    def __init__(self, name: str, store: Store, cache: Path, shards: int) -> None:
        environment = os.environ | {"AWS_ENDPOINT_URL": store.url, "S3_ENDPOINT_URL": store.url}
        environment |= {"AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any", "AWS_DEFAULT_REGION": "us-east-1"}
        environment |= {"REMOTE_SHARDS": str(shards), "XDG_CACHE_HOME": str(cache), "HF_HOME": str(cache)}
        self.errors = (cache.parent / f"{cache.name}.txt").open("w+")
        command = [sys.executable, str(_HERE / "_remote_peers.py"), name, store.url, str(cache / "peer")]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, env=environment, bufsize=0
        )
        self.rest = b""

    def go(self, what: bytes = b"") -> None:
        """Ask for an epoch, or its ``first`` batch."""
        assert self.process.stdin is not None
        self.process.stdin.write(what + b"\n")

    def answer(self, deadline: float) -> dict[str, Any]:
        """Return the next line that the peer prints."""
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while b"\n" not in self.rest:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise FailedError("took too long")
                piece = os.read(self.process.stdout.fileno(), 1 << 16)
                if not piece:
                    raise FailedError(self.last_words())
                self.rest += piece
        line, _, self.rest = self.rest.partition(b"\n")
        try:
            found: dict[str, Any] = json.loads(line)
        except ValueError:  # libraries print, too
            return self.answer(deadline)
        if "missing" in found:
            raise FailedError(found["missing"])
        return found

    def last_words(self) -> str:
        self.errors.seek(0)
        lines = self.errors.read().splitlines()
        named = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Timeout)\b", line)]
        return " ".join((named or lines or ["ended without a word"])[-1].split())[:100]

    def kill(self) -> None:
        """Kill the process, which `end` reaps."""
        os.kill(self.process.pid, signal.SIGKILL)

    def end(self) -> float:
        """End the process; CPU seconds of it and of its children."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        timer = threading.Timer(10, self.kill)
        timer.start()
        # Unlike Popen's wait, this tells what the process used.
        _, status, usage = os.wait4(self.process.pid, 0)
        timer.cancel()
        self.process.returncode = os.waitstatus_to_exitcode(status)
        self.process.stdout.close()
        self.errors.close()
        return usage.ru_utime + usage.ru_stime


def measure(name: str, store: Store, where: Path, shards: int, epochs: int, limit: float) -> Run:
    """Run a peer in a fresh process with an empty cache."""
    cache = where / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    (cache / "peer").mkdir(parents=True)
    made, started = Run(), time.monotonic()
    process = Process(name, store, cache, shards)
    try:
        for number in range(epochs):
            store.reset()
            began = time.monotonic()
            process.go()
            process.answer(began + limit)
            made.first = made.first or time.monotonic() - started
            found = process.answer(began + limit)
            counts = store.counts()
            seconds = time.monotonic() - (began if number else started)
            requests = sum(counts["requests"].values())
            made.epochs.append(Epoch(seconds, **found, requests=requests, bytes=counts["bytes"]))
        made.disk = sum(path.stat().st_blocks * 512 for path in cache.rglob("*") if path.is_file())
    except (FailedError, BrokenPipeError) as error:
        made.failed = str(error) or "ended early"
        process.kill()
    finally:
        made.cpu = process.end()
    return made


def beside(store: Store, where: Path, options: argparse.Namespace) -> None:
    """Print a table for each latency: all peers, in turn."""
    for latency in options.latency:
        store.behave(latency=latency / 1e3)
        runs: dict[str, list[Run]] = defaultdict(list)
        for _, name in itertools.product(range(options.repeat), options.peers):
            if not (runs[name] and runs[name][-1].failed):
                runs[name].append(measure(name, store, where, options.shards, 2, 60))
        tables(runs, f"{options.lines:,} JPEGs in {options.shards} shards, {latency:g} ms before each answer")


def start(store: Store, where: Path, options: argparse.Namespace) -> None:
    """Print how long it is until the first batch of many files, for each latency."""
    for latency in options.latency:
        store.behave(latency=latency / 1e3)
        found: dict[str, list[tuple[float, int, int]]] = defaultdict(list)
        failed: dict[str, list[str]] = defaultdict(list)
        for _, name in itertools.product(range(options.repeat), options.peers):
            try:
                found[name].append(first_batch(name, store, where, options.shards, 90))
            except (FailedError, BrokenPipeError) as error:
                failed[name].append(str(error) or "ended early")
        rows: list[tuple[object, ...]] = []
        for name in options.peers:
            fails = f" ({len(failed[name])} of {options.repeat} failed: {failed[name][-1]})" if failed[name] else ""
            if not found[name]:
                rows.append((name + fails, *["-"] * 5))
                continue
            seconds, requests, sent = zip(*found[name], strict=True)
            cost = f"{statistics.median(requests):.0f}", f"{statistics.median(sent) / 1e6:.1f}"
            rows.append((name + fails, *spread(seconds), *cost))
        columns = ["peer", "first batch, s: min", "median", "max", "requests by then", "MB by then"]
        title = f"From nothing to a batch of {options.shards:,} files, {latency:g} ms before each answer"
        table(title, columns, rows, peer="WebDataset")


def first_batch(name: str, store: Store, where: Path, shards: int, limit: float) -> tuple[float, int, int]:
    """Return how many seconds a fresh process with an empty cache takes, and what the store had sent by then."""
    cache = where / "cache"
    shutil.rmtree(cache, ignore_errors=True)
    (cache / "peer").mkdir(parents=True)
    store.reset()
    began = time.monotonic()
    process = Process(name, store, cache, shards)
    try:
        process.go(b"first")
        process.answer(began + limit)
        seconds, counts = time.monotonic() - began, store.counts()
    except BaseException:
        process.kill()
        raise
    finally:
        process.end()
    return seconds, sum(counts["requests"].values()), counts["bytes"]


def tables(runs: dict[str, list[Run]], title: str) -> None:
    """Print how long it took, and what it cost."""
    times: list[tuple[object, ...]] = []
    costs: list[tuple[object, ...]] = []
    for name, found in runs.items():
        if failed := found[-1].failed:
            times.append((f"{name} (fails: {failed})", *["-"] * 9))
            continue
        cold, warm = ([run.epochs[number] for run in found] for number in (0, 1))
        rates = [[epoch.samples / epoch.seconds for epoch in part] for part in (cold, warm)]
        times.append((name, *spread([run.first for run in found]), *spread(rates[0]), *spread(rates[1])))
        cpu = statistics.median(run.cpu / sum(epoch.samples for epoch in run.epochs) for run in found)
        costs.append(
            (
                name,
                *(f"{statistics.median(epoch.bytes for epoch in part) / 1e6:.2f}" for part in (cold, warm)),
                *(f"{statistics.median(epoch.requests for epoch in part):.0f}" for part in (cold, warm)),
                f"{statistics.median(run.disk for run in found) / 1e6:.2f}",
                f"{1e6 * cpu:.0f}",
                f"{cold[0].samples:,}",
            )
        )
    columns = ["peer", "first batch, s: min", "median", "max", "cold samples/s: min", "median", "max"]
    table(title, [*columns, "warm samples/s: min", "median", "max"], times, peer="WebDataset")
    columns = ["peer", "cold MB", "warm MB", "cold requests", "warm requests", "disk MB", "CPU us a sample", "samples"]
    table(f"What that costs: {title}", columns, costs)


def faults(store: Store, where: Path, options: argparse.Namespace) -> None:
    """Print the table of slow and failing stores."""
    ways: dict[str, dict[str, Any]] = {
        "none": {},
        "5 % of requests fail": {"unavailable": 0.025, "cut": 0.025},
        "5 % take 2 s": {"slow": 0.05},
        f"gone for {options.outage:g} s": {"outage": options.outage},
    }
    rows: list[tuple[object, ...]] = []
    for name in [name for name in options.peers if name in _FAULTY]:
        expected, half = None, 1
        for way, behaviour in ways.items():
            # An outage begins in the middle of what the peer asks for.
            begin = {"outage_after": half} if "outage" in behaviour else {}
            store.behave(latency=0.005, **behaviour, **begin)
            run = measure(name, store, where, options.shards, 1, 60 + 2 * options.outage)
            if run.failed:
                rows.append((name, way, f"fails: {run.failed}", "", "", ""))
                continue
            [epoch] = run.epochs
            if expected is None:
                expected, half = epoch.digest, max(1, epoch.requests // 2)
            same = "yes" if epoch.digest == expected else f"no, {epoch.samples:,} samples"
            rate = f"{epoch.samples / epoch.seconds:,.0f}"
            rows.append((name, way, same, rate, f"{epoch.seconds:.2f}", f"{epoch.longest:.2f}"))
    store.behave()
    columns = ["peer", "faults", "the same samples", "samples/s", "epoch, s", "longest wait, s"]
    table(f"A slow or failing store, {options.lines:,} JPEGs, 5 ms before each answer", columns, rows)


_PARTS = {"start": start, "beside": beside, "faults": faults}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--lines", type=int, default=20_000, help="samples (default: %(default)s)")
    parser.add_argument("--shards", type=int, default=32, help="files of each format (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=2, help="how often each is measured (default: %(default)s)")
    parser.add_argument("--latency", type=float, nargs="+", default=[0, 5, 50], help="ms (default: %(default)s)")
    parser.add_argument("--outage", type=float, default=30, help="seconds without a store (default: %(default)s)")
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=list(PEERS), help="who is measured")
    parser.add_argument("--parts", nargs="+", default=["beside"], choices=list(_PARTS), help="what to measure")
    parser.add_argument("--data", type=Path, help="folder with cifar10-jpg.tar.xz")
    parser.add_argument("--dir", default=None, help="folder for the files (default: a temporary one)")
    small = {"lines": 1000, "shards": 8, "repeat": 1, "latency": [5.0], "outage": 5.0}
    options = parse(parser, small, _VERSIONS)
    with folder(options.dir) as where:
        bucket = where / "store" / "data"
        images = [sample["jpg"] for sample in cifar(options.data, options.lines)]
        write_parquet(images, bucket / "parquet", options.shards)
        command = [sys.executable, str(_HERE / "_remote_files.py"), str(bucket), str(options.shards)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        with Store(where / "store") as store:
            for part in options.parts:
                _PARTS[part](store, where, options)


if __name__ == "__main__":
    main()
