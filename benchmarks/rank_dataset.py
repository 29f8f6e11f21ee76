"""RankDataset: start-up, memory and the next mini-epoch, beside a list of lines, in one run.

Each rank is a fresh process that holds its share of an epoch in four mini-epochs and passes it to four forked workers,
which read 100,000 random items. The peer keeps the lines of its share in Python lists, as loaders that read a meta file
do. Memory is anonymous memory (``Anonymous`` of smaps_rollup) beyond what the process had after it read a small file,
when everything is imported, and for workers the growth of ``Pss_Anon``; file pages are shared by all processes.

    python benchmarks/rank_dataset.py --lines 10000000 --ranks 8 --repeat 3
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from _common import make_manifest, parse, smaps_rollup, spread, table

MINI_EPOCHS = 4
WORKERS = 4


class ListShare:
    """The peer: lines of this rank's share of one mini-epoch, gathered anew for each mini-epoch."""

    def __init__(self, path: str, rank: int, world_size: int, mini_epoch: int) -> None:
        with open(path) as file:
            n = sum(1 for _ in file)
        order = np.random.default_rng(0).permutation(n).tolist()
        share = -(-n // (world_size * MINI_EPOCHS))
        begin = (mini_epoch * world_size + rank) * share
        mine = set(order[begin : begin + share])
        with open(path) as file:
            self.rows = [(*line.rstrip("\n").rsplit(" ", 1), i) for i, line in enumerate(file) if i in mine]

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)


class PeakSampler(threading.Thread):
    """The largest anonymous memory of this process while it lives."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak, self.stopped = 0, threading.Event()

    def run(self) -> None:
        while not self.stopped.wait(0.01):
            self.peak = max(self.peak, anonymous())


def anonymous() -> int:
    """Bytes of anonymous memory of this process."""
    return smaps_rollup(os.getpid())["Anonymous"]


def ours(path: str, rank: int, world_size: int) -> tuple[Any, Callable[[], Any]]:
    from penstock import RankDataset

    dataset = RankDataset(path, rank=rank, world_size=world_size, mini_epochs=MINI_EPOCHS)

    def following() -> Any:
        dataset.next_mini_epoch()
        return dataset

    return dataset, following


def peer(path: str, rank: int, world_size: int) -> tuple[Any, Callable[[], Any]]:
    return ListShare(path, rank, world_size, 0), lambda: ListShare(path, rank, world_size, 1)


def worker(dataset: Any, connection: Any) -> None:
    """Read many items as a loader's worker would, and say how much memory that made private."""
    before = proportional()
    indices = np.random.default_rng(1).integers(0, len(dataset), 100_000).tolist()
    getitems = getattr(dataset, "__getitems__", lambda batch: [dataset[i] for i in batch])
    for begin in range(0, len(indices), 256):
        getitems(indices[begin : begin + 256])
    connection.send(proportional() - before)


def proportional() -> int:
    """Bytes of anonymous memory of this process, pages shared after the fork counted by their share."""
    return smaps_rollup(os.getpid())["Pss_Anon"]


def rank_process(make: Callable[..., Any], path: str, rank: int, world_size: int, connection: Any) -> None:
    for kind in (ours, peer):  # both are measured beyond the same imports
        dataset, _ = kind(f"{path}.small", 0, 1)
        assert len(dataset[0]) == 3
    del dataset
    base = anonymous()
    sampler = PeakSampler()
    sampler.start()
    begin = time.perf_counter()
    dataset, following = make(path, rank, world_size)
    first = dataset[0]
    start = time.perf_counter() - begin
    held = anonymous() - base
    begin = time.perf_counter()
    dataset = following()
    first = dataset[0]
    following_time = time.perf_counter() - begin
    assert len(first) == 3
    sampler.stopped.set()
    sampler.join()
    private = []
    for _ in range(WORKERS):
        ours_end, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("fork").Process(target=worker, args=(dataset, theirs))
        process.start()
        private.append(ours_end.recv())
        process.join()
    connection.send((start, held, max(sampler.peak - base, held), following_time, max(private)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lines", type=int, default=10_000_000)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--dir", default=None)
    options = parse(parser, {"lines": 100_000, "repeat": 1})
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        path = str(Path(folder) / "meta.txt")
        make_manifest(path, options.lines)
        make_manifest(f"{path}.small", 1000)
        from penstock import Manifest

        for name in (path, f"{path}.small"):
            Manifest.open(name)  # the index is made once, by whoever comes first
        context = multiprocessing.get_context("spawn")
        results: dict[str, list[tuple[float, ...]]] = {"penstock": [], "list of lines": []}
        for repeat in range(options.repeat):
            for name, make in (("penstock", ours), ("list of lines", peer)):
                end, other = multiprocessing.Pipe()
                rank = repeat % options.ranks
                process = context.Process(target=rank_process, args=(make, path, rank, options.ranks, other))
                process.start()
                results[name].append(end.recv())
                process.join()
    rows = []
    for name, runs in results.items():
        for metric, unit, column, scale in (
            ("start to first item", "s", 0, 1.0),
            ("next mini-epoch to first item", "s", 3, 1.0),
            ("held by a rank", "MiB", 1, 2**20),
            ("peak of a rank", "MiB", 2, 2**20),
            ("private to a worker", "MiB", 4, 2**20),
        ):
            values = [run[column] / scale for run in runs]
            rows.append((metric, name, unit, *spread(values, 4)))
    rows.sort(key=lambda row: row[0])
    title = f"RankDataset: {options.lines:,} lines, {options.ranks} ranks, {MINI_EPOCHS} mini-epochs"
    table(title, ["what", "which", "unit", "min", "median", "max"], rows, peer="list of lines")


if __name__ == "__main__":
    main()
