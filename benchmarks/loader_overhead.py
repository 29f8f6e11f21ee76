"""The DataLoader beside torch's: bytes and batches per second, CPU of the main process, time to a first batch.

Both loaders run in turn, with two worker processes, on one array of random bytes in random order, larger than any
cache, so that no sample is hot. The dataset returns rows as they are, without a copy; the consumer reads every byte of
every batch once, by xxh3, which also proves that all loaders give the same batches. CPU time of the main process counts
all its threads and the consumer's reading; that of the workers is from /proc; both in microseconds per batch. "Ratio"
and "CPU" are rate and CPU time of the main process as a share of torch's in the same round.

Rows are tensors (the headline: collating them is what torch does best) or NumPy arrays, of which torch's collate
function makes a tensor each. The first batch is timed from the loader's constructor on, in a fresh process, with the
dataset at hand; over a manifest the bar is the faster one of torch over the same manifest and torch over a list.

    python benchmarks/loader_overhead.py --repeat 5 --seconds 1
"""

from __future__ import annotations

import argparse
import gc
import itertools
import multiprocessing
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.utils.data
import xxhash
from torch.utils.data import Dataset

import penstock
from _common import folder, make_manifest, parse, spread, table

BATCH = 64
IMAGE = 3 * 224 * 224
LOADERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "torch": (torch.utils.data.DataLoader, {}),
    "penstock": (penstock.DataLoader, {"executor": "process"}),
    "penstock seed=0": (penstock.DataLoader, {"executor": "process", "seed": 0}),
}


class Rows(Dataset[Any]):
    """The rows of an array, as views."""

    pure = True

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


class Again(Rows):
    """The same rows many times over, for a pass that is long enough to measure."""

    times = 16

    def __len__(self) -> int:
        return self.times * len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index % len(self.rows)]


class Lines(Rows):
    """Path and label of each row of a manifest, or of a list of tuples."""

    def __getitem__(self, index: int) -> Any:
        return self.rows[index][:2]


class Count(Dataset[int]):
    """A million samples that cost nothing."""

    pure = True

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> int:
        return index


@dataclass
class Round:
    """What one loader did in one round: a rate, and microseconds of CPU time per batch."""

    rate: float
    main: float
    reading: float
    workers: float
    digests: list[int] = field(repr=False)


def read(batch: torch.Tensor) -> int:
    """All bytes of a batch, once."""
    return xxhash.xxh3_64_intdigest(batch.numpy())


def run(name: str, dataset: Any, seconds: float, warm: int, seed: int) -> Round:
    """One round: some batches to get going, then as many as come within ``seconds``."""
    make, options = LOADERS[name]
    torch.manual_seed(seed)
    others = set(psutil.Process().children(recursive=True))
    loader = make(dataset, batch_size=BATCH, shuffle=True, num_workers=2, **options)
    iterator = iter(loader)
    digests = [read(batch) for batch in itertools.islice(iterator, warm)]
    workers = [child for child in psutil.Process().children(recursive=True) if child not in others]
    before, main, reading, count = worker_seconds(workers), time.process_time(), 0.0, 0
    start = time.perf_counter()
    end = start + seconds
    for batch in iterator:
        begin = time.thread_time()
        digests.append(read(batch))
        reading += time.thread_time() - begin
        count += 1
        if time.perf_counter() >= end:
            break
    else:
        warnings.warn(f"{name}: the pass ended before {seconds} s were over", stacklevel=2)
    took, main = time.perf_counter() - start, time.process_time() - main
    after = worker_seconds(workers)
    del iterator, batch
    close(loader)
    return Round(count / took, *(1e6 * cpu / count for cpu in (main, reading, after - before)), digests)


def worker_seconds(workers: Sequence[psutil.Process]) -> float:
    """CPU time of processes that live, in steps of 10 ms."""
    return sum(sum(worker.cpu_times()[:2]) for worker in workers)


def close(loader: Any) -> None:
    """Let the workers go."""
    getattr(loader, "close", lambda: None)()
    gc.collect()


def expected(dataset: Any, count: int) -> list[int]:
    """The first batches under ``seed=0``, made without workers."""
    with penstock.DataLoader(dataset, batch_size=BATCH, shuffle=True, seed=0) as loader:
        return [read(batch) for batch in itertools.islice(loader, count)]


def check(rounds: dict[str, list[Round]], truth: list[int]) -> None:
    """All loaders gave the same batches: in torch's order without a seed, in ours with it."""
    for peer, ours in zip(rounds["torch"], rounds["penstock"], strict=True):
        count = min(len(peer.digests), len(ours.digests))
        assert peer.digests[:count] == ours.digests[:count], "not torch's batches"
    longest = max((ours.digests for ours in rounds["penstock seed=0"]), key=len)
    assert longest[: len(truth)] == truth, "not the batches of the inline executor"
    for ours in rounds["penstock seed=0"]:
        assert ours.digests == longest[: len(ours.digests)], "one round is not like another"


def throughput(title: str, array: Any, dataset: type[Rows], warm: int, options: argparse.Namespace) -> None:
    """Rates and CPU times for one size of samples."""
    rows = []
    kinds = {"tensors": dataset(torch.from_numpy(array)), "arrays": dataset(array)}
    rounds: dict[str, dict[str, list[Round]]] = {kind: {name: [] for name in LOADERS} for kind in kinds}
    for k, (kind, data), name in itertools.product(range(options.repeat), kinds.items(), LOADERS):
        rounds[kind][name].append(run(name, data, options.seconds, warm, seed=k))
    for kind, data in kinds.items():
        longest = max(len(result.digests) for result in rounds[kind]["penstock seed=0"])
        check(rounds[kind], expected(data, min(longest, 2000)))
        for name, results in rounds[kind].items():
            peers = rounds[kind]["torch"]
            rate = [result.rate for result in results]
            ratio = [ours.rate / peer.rate for ours, peer in zip(results, peers, strict=True)]
            share = [ours.main / peer.main for ours, peer in zip(results, peers, strict=True)]
            columns = [statistics.median(getattr(r, part) for r in results) for part in ("main", "reading", "workers")]
            size = BATCH * array[0].nbytes / 1e9
            row = [
                kind,
                name,
                *spread(rate, 4),
                f"{statistics.median(rate) * size:.3g}",
                *map("{:.0f}".format, columns),
            ]
            bars = "" if name == "torch" else f"{verdict(ratio, 6, least=True)}, {verdict(share, 0.5)}"
            rows.append((*row, *spread(ratio, unit="x"), *spread(share, 2), bars))
    header = [
        "rows",
        "loader",
        "batches/s: min",
        "median",
        "max",
        "GB/s",
        "CPU us: main",
        "CPU: reading",
        "CPU: workers",
    ]
    header += ["ratio: min", "median", "max", "main CPU of torch's: min", "median", "max", "bars: 6x, half"]
    table(f"{title}, {options.repeat} rounds of {options.seconds} s", header, rows, peer="torch")


def verdict(values: Sequence[float], bar: float, *, least: bool = False) -> str:
    """Whether the median meets a bar."""
    median = statistics.median(values)
    return "met" if (median >= bar if least else median <= bar) else "missed"


def fresh(function: Callable[..., Any], *args: Any) -> Any:
    """What a function returns in a new process, whose own workers start as they would in this one."""
    end, other = multiprocessing.Pipe()
    method = multiprocessing.get_start_method()
    process = multiprocessing.get_context("spawn").Process(target=_send, args=(method, function, args, other))
    process.start()
    other.close()
    result = end.recv()
    process.join()
    return result


def _send(method: str, function: Callable[..., Any], args: tuple[Any, ...], connection: Any) -> None:
    multiprocessing.set_start_method(method, force=True)
    connection.send(function(*args))


def first_batches(name: str, source: str, path: str) -> list[float]:
    """Milliseconds to the first batch over a manifest, three loaders one after the other in this process."""
    rows: Any = penstock.Manifest.open(path)
    if source == "list":
        with open(path) as file:
            rows = [(p, int(label)) for p, _, label in (line.rpartition(" ") for line in file)]
    make, options = LOADERS[name]
    result = []
    for _ in range(3):
        gc.collect()
        begin = time.perf_counter()
        loader = make(Lines(rows), batch_size=BATCH, shuffle=True, num_workers=2, **options)
        iterator = iter(loader)
        paths, labels = next(iterator)
        result.append(1e3 * (time.perf_counter() - begin))
        assert len(paths) == len(labels) == BATCH
        del iterator
        close(loader)
    return result


def first(options: argparse.Namespace) -> None:
    """Time to the first batch of a dataset over a manifest."""
    with folder(options.dir) as directory:
        path = str(Path(directory) / "meta.txt")
        make_manifest(path, options.lines)
        penstock.Manifest.open(path)
        peers = [(name, source) for name in LOADERS for source in ("manifest", "list")]
        times: dict[tuple[str, str], list[list[float]]] = {peer: [] for peer in peers}
        for _, peer in itertools.product(range(options.repeat), peers):
            times[peer].append(fresh(first_batches, *peer, path))
    bars = {
        source: [statistics.median(column(times["torch", source], k)) for k in (0, 2)]
        for source in ("manifest", "list")
    }
    bars["manifest"] = list(map(min, bars["manifest"], bars["list"]))  # whichever way a user of torch would take
    rows = []
    for (name, source), measured in times.items():
        cold, later = column(measured, 0), column(measured, 2)
        text = "" if name == "torch" else ", ".join(map(verdict, (cold, later), bars[source]))
        rows.append((name, source, *spread(cold), *spread(later), text))
    header = [
        "loader",
        "over",
        "fresh process, ms: min",
        "median",
        "max",
        "third loader, ms: min",
        "median",
        "max",
        "bars: torch's",
    ]
    table(f"First batch of {BATCH}, {options.lines:,} rows, shuffled", header, rows, peer="torch")


def column(rows: Sequence[Sequence[float]], k: int) -> list[float]:
    return [row[k] for row in rows]


DATA: dict[str, tuple[Callable[[], Any], int]] = {
    "64 x 1 KB": (lambda: Rows(torch.zeros(BATCH * 100, 1024, dtype=torch.uint8)), BATCH),
    "64 x 150 KB": (lambda: Rows(torch.zeros(BATCH * 12, IMAGE, dtype=torch.uint8)), BATCH),
    "512 of 1 M integers": (Count, 512),
}


def later_epochs(name: str, data: str) -> list[float]:
    """Milliseconds to the first batch of the second epoch and of three more, workers persistent."""
    dataset, batch_size = DATA[data][0](), DATA[data][1]
    make, options = LOADERS[name]
    loader = make(dataset, batch_size=batch_size, shuffle=True, num_workers=2, persistent_workers=True, **options)
    result = []
    for _ in range(5):
        begin = time.perf_counter()
        iterator = iter(loader)
        next(iterator)
        result.append(1e3 * (time.perf_counter() - begin))
        for batch in iterator:
            del batch
    del iterator
    close(loader)
    return result[1:]


def second(options: argparse.Namespace) -> None:
    """Time to the first batch of later epochs."""
    times: dict[tuple[str, str], list[float]] = {(data, name): [] for data in DATA for name in LOADERS}
    for _, (data, name) in itertools.product(range(max(1, options.repeat // 2)), times):
        times[data, name] += fresh(later_epochs, name, data)
    rows = [
        (data, name, *spread(measured), "" if name == "torch" else verdict(measured, 5))
        for (data, name), measured in times.items()
    ]
    header = ["batch", "loader", "ms: min", "median", "max", "bar: 5 ms"]
    table("First batch of epochs 2 to 5, persistent workers", header, rows, peer="torch")


def random_bytes(rows: int, width: int) -> Any:
    """An array of bytes that are all different."""
    return np.frombuffer(np.random.default_rng(0).bytes(rows * width), np.uint8).reshape(rows, width).copy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parts", nargs="+", default=("large", "small", "first", "second"), help="which to measure")
    parser.add_argument("--repeat", type=int, default=5, help="rounds (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=1.0, help="of one loader in a round (default: %(default)s)")
    parser.add_argument("--megabytes", type=int, default=1200, help="of samples (default: %(default)s)")
    parser.add_argument("--lines", type=int, default=1_000_000, help="rows of the manifest (default: %(default)s)")
    parser.add_argument("--dir", default=None, help="folder for the manifest (default: a temporary one)")
    options = parse(parser, {"parts": ["small"], "repeat": 1, "seconds": 0.1, "megabytes": 300})
    if "first" in options.parts:
        first(options)
    if "second" in options.parts:
        second(options)
    if "large" in options.parts:
        array = random_bytes(options.megabytes * 10**6 // IMAGE, IMAGE)
        throughput(f"64 x 150 KB of {array.nbytes / 1e9:.2f} GB", array, Again, 16, options)
        del array
    if "small" in options.parts:
        array = random_bytes(options.megabytes * 10**6 // 1024, 1024)
        throughput(f"64 x 1 KB of {array.nbytes / 1e9:.2f} GB", array, Rows, 100, options)


if __name__ == "__main__":
    main()
