"""Whether a DataLoader's memory stays flat: 1,000 batches in one epoch, and 20 epochs, beside torch's.

Each case is a fresh process with two worker processes. Counted while batches come, per process: anonymous memory
(``Anonymous`` of smaps_rollup: what a forked worker inherited counts in full, so that nothing hides in sharing), shared
memory (``Pss_Shmem``: divided by those who map it), file descriptors and threads; of the workers the largest. "Growth"
is the median of the last quarter of the counts minus that of the second quarter, so that what is allocated once at the
start does not count. Flat is at most a MiB, no thread, and no more descriptors than come and go. "Left" is what
remains when the loader is gone: descriptors and threads more than before it was made, and child processes.

    python benchmarks/loader_memory.py --batches 1000 --epochs 20
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import psutil
import torch
import torch.utils.data
from torch.utils.data import Dataset

import penstock
from _common import parse, smaps_rollup, table

BATCH = 64
LOADERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "torch": (torch.utils.data.DataLoader, {}),
    "penstock": (penstock.DataLoader, {"executor": "process"}),
    "penstock seed=0": (penstock.DataLoader, {"executor": "process", "seed": 0}),
}
FLAT = 1.0  # MiB of growth: two KB for each batch between the two quarters
DESCRIPTORS = 2  # torch's number rises and falls by a few


class Images(Dataset[Any]):
    """Small images that differ in their first bytes, and labels; a new array for each sample, as decoding makes one."""

    pure = True

    def __init__(self, length: int, side: int) -> None:
        self.length, self.side = length, side

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        image = np.zeros((3, self.side, self.side), np.uint8)
        image[0, 0, :8] = np.frombuffer(index.to_bytes(8, "little"), np.uint8)
        return image, index


@dataclass
class Count:
    """One look at a process: MiB and numbers."""

    anonymous: float
    shared: float
    descriptors: float
    threads: float

    @classmethod
    def of(cls, process: psutil.Process) -> Count:
        """A process that lives."""
        memory = smaps_rollup(process.pid)
        parts = (memory[name] / 2**20 for name in ("Anonymous", "Pss_Shmem"))
        return cls(*parts, process.num_fds(), process.num_threads())


@dataclass
class Case:
    """All looks at one loader, and what was left of it."""

    main: list[Count]
    workers: list[Count]
    left: tuple[float, float, int]
    seconds: float


def passes(loader: Any, epochs: int) -> Iterator[tuple[int, Any]]:
    """Batches of all epochs, numbered within their epoch."""
    for _ in range(epochs):
        yield from enumerate(loader)


def run(
    name: str, persistent: bool, epochs: int, batches: int, look: int, side: int, connection: Any, method: str
) -> None:
    """One case: every ``look``-th batch of each epoch is a moment to count."""
    multiprocessing.set_start_method(method, force=True)
    torch.set_num_threads(1)  # or torch starts threads of its own to shuffle long data sets
    make, options = LOADERS[name]
    me, main, workers, seen = psutil.Process(), [], [], 0
    before = set(me.children(recursive=True))
    warm(make, options)
    empty = Count.of(me)
    start = time.perf_counter()
    dataset = Images(batches * BATCH, side)
    loader = make(dataset, batch_size=BATCH, shuffle=True, num_workers=2, persistent_workers=persistent, **options)
    for k, (images, labels) in passes(loader, epochs):
        seen += int(images[0, 0, 0, 0]) == int(labels[0]) % 256
        if k % look == look - 1:
            main.append(Count.of(me))
            living = []
            for child in set(me.children(recursive=True)) - before:
                with contextlib.suppress(OSError, psutil.Error):  # one may end with the epoch
                    living.append(Count.of(child))
            if living:
                workers.append(Count(*map(max, zip(*map(astuple, living), strict=True))))
    assert seen == epochs * batches, "a batch holds other samples than it says"
    seconds = time.perf_counter() - start
    del images, labels
    getattr(loader, "close", lambda: None)()
    del loader
    gc.collect()
    after = Count.of(me)
    children = sum(child not in before for child in me.children(recursive=True))
    left = (after.descriptors - empty.descriptors, after.threads - empty.threads, children)
    connection.send(Case(main, workers, left, seconds))


def warm(make: Callable[..., Any], options: dict[str, Any]) -> None:
    """A first loader, for what a process keeps for good once it had one."""
    loader = make(Images(4 * BATCH, 8), batch_size=BATCH, num_workers=2, **options)
    for _ in loader:
        pass
    getattr(loader, "close", lambda: None)()
    del loader
    gc.collect()


def fresh(*args: Any) -> Case:
    """One case in a new process, whose own workers start as they would in this one."""
    end, other = multiprocessing.Pipe()
    method = multiprocessing.get_start_method()
    process = multiprocessing.get_context("spawn").Process(target=run, args=(*args, other, method))
    process.start()
    other.close()
    case: Case = end.recv()
    process.join()
    return case


def growth(counts: list[Count], part: str) -> float:
    """The last quarter against the second one, medians."""
    values, quarter = [getattr(count, part) for count in counts], max(1, len(counts) // 4)
    return statistics.median(values[-quarter:]) - statistics.median(values[quarter : 2 * quarter])


def report(title: str, cases: dict[tuple[str, bool], Case]) -> None:
    """Largest values and growth, per process."""
    rows = []
    for (name, persistent), case in cases.items():
        row: list[object] = [name, "yes" if persistent else "no"]
        grown, steady = [], True
        for counts in (case.main, case.workers):
            for part in ("anonymous", "shared"):
                grown.append(growth(counts, part))
                row += [f"{max(getattr(count, part) for count in counts):.1f}", f"{grown[-1]:+.2f}"]
            row += [
                f"{min(getattr(count, part) for count in counts):g}-{max(getattr(count, part) for count in counts):g}"
                for part in ("descriptors", "threads")
            ]
            steady &= growth(counts, "threads") <= 0 and growth(counts, "descriptors") <= DESCRIPTORS
        flat = steady and max(grown) <= FLAT and not any(case.left)
        rows.append((*row, "/".join(f"{left:g}" for left in case.left), f"{case.seconds:.1f}", "yes" if flat else "NO"))
    header = ["loader", "persistent"]
    for who in ("main", "worker"):
        header += [f"{who}: anon MiB", "growth", "shared MiB", "growth", "fds", "threads"]
    table(title, [*header, "left", "s", "flat"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batches", type=int, default=1000, help="of the long epoch (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=20, help="short ones, of 50 batches (default: %(default)s)")
    parser.add_argument("--side", type=int, default=64, help="of an image (default: %(default)s)")
    options = parse(parser, {"batches": 100, "epochs": 2})
    size = f"{BATCH * 3 * options.side**2 / 1e6:.2f} MB"
    for title, persistence, epochs, batches, look in (
        (f"{options.batches} batches of {size}", (False,), 1, options.batches, 20),
        (f"{options.epochs} epochs of 50 batches of {size}", (False, True), options.epochs, 50, 25),
    ):
        kinds = itertools.product(LOADERS, persistence)
        report(title, {(name, kept): fresh(name, kept, epochs, batches, look, options.side) for name, kept in kinds})


if __name__ == "__main__":
    main()
