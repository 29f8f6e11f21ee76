"""Whether a DataLoader's memory stays flat: 1,000 batches in one epoch, and 20 epochs, beside torch's.

Each case is a fresh process with two worker processes. Counted while batches come, per process: anonymous memory
(``Anonymous`` of smaps_rollup: what a forked worker inherited counts in full, so that nothing hides in sharing), shared
memory (``Pss_Shmem``: divided by those who map it), file descriptors and threads; of the workers the largest. "Growth"
is the median of the last quarter of the counts minus that of the second quarter, so that what is allocated once at the
start does not count. Flat is at most a MiB, no thread, and no more descriptors than come and go. "Left" is what
remains when the loader is gone: descriptors and threads more than before it was made, and child processes.

Then shared memory where batches differ, with four workers, each loader in a fresh process: one batch of 240 MiB among
some of 4 MiB, batches that grow from 2 to 20 MiB, and images, all of one size. Counted at each batch, while the queue
is full: bytes that the system has set aside for files that the program or a worker has open or mapped, each file once.
"After" is the largest count from the tenth batch on behind the one of 240 MiB.

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
from pathlib import Path
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


MIB = 2**20
WORKERS = 4


class Sized(Dataset[Any]):
    """Samples of so many bytes."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> Any:
        return np.full(self.sizes[index], index % 251, np.uint8)


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
    torch.set_num_threads(1)  # or torch starts threads of its own to shuffle long datasets
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


def odd_sizes(count: int) -> dict[str, list[int]]:
    """Bytes of so many batches, by case; the odd one is in the middle."""
    return {
        "one of 240 MiB": [240 * MIB if k == count // 2 else 4 * MIB for k in range(count)],
        "2 to 20 MiB": [int(2 * MIB * 10 ** (k / (count - 1))) for k in range(count)],
        "images, 18 MiB": [128 * 3 * 224 * 224] * (count // 2),
    }


def shared_files() -> float:
    """MiB of shared memory that this process and its children have, each file once."""
    found: dict[int, int] = {}
    for process in (psutil.Process(), *psutil.Process().children()):
        folder = Path(f"/proc/{process.pid}")
        with contextlib.suppress(OSError):  # one may end
            for link in (folder / "fd").iterdir():
                with contextlib.suppress(OSError):  # or be closed
                    if str(link.readlink()).startswith(("/memfd:penstock", "/dev/shm/")):
                        found[link.stat().st_ino] = link.stat().st_blocks * 512
            for line in (folder / "maps").read_text().splitlines():
                place, _, _, _, inode, *name = line.split()
                if name and name[0].startswith("/dev/shm/"):  # torch maps all of a file, and fills it
                    begin, end = (int(number, 16) for number in place.split("-"))
                    found.setdefault(int(inode), end - begin)
    return sum(found.values()) / MIB


def run_odd(name: str, sizes: list[int], connection: Any, method: str) -> None:
    """Shared memory at each batch."""
    multiprocessing.set_start_method(method, force=True)
    torch.set_num_threads(1)
    make, options = LOADERS[name]
    counts = []
    for k, batch in enumerate(make(Sized(sizes), batch_size=1, num_workers=WORKERS, **options)):
        assert batch.shape == (1, sizes[k])
        assert int(batch[0, 0]) == int(batch[0, -1]) == k % 251, "a batch holds other samples than it says"
        time.sleep(0.02)  # the step, in which the queue becomes full
        counts.append(shared_files())
        del batch
    connection.send(counts)


def report_odd(count: int) -> None:
    """Batches that differ, beside torch's loader."""
    rows = []
    for case, sizes in odd_sizes(count).items():
        peaks = {}
        for name in ("torch", "penstock"):
            end, other = multiprocessing.Pipe()
            arguments = name, sizes, other, multiprocessing.get_start_method()
            process = multiprocessing.get_context("spawn").Process(target=run_odd, args=arguments)
            process.start()
            other.close()
            counts: list[float] = end.recv()
            process.join()
            peaks[name] = max(counts)
            large = max(range(len(sizes)), key=sizes.__getitem__)
            after = f"{max(counts[large + 10 :]):.0f}" if large + 10 < len(counts) and max(sizes) > 200 * MIB else ""
            middle = f"{statistics.median(counts):.0f}"
            rows.append((case, name, f"{max(counts):.0f}", middle, after, f"{peaks[name] / peaks['torch']:.2f}x"))
    header = ["batches", "loader", "peak: shared MiB", "median", "after", "peak / torch's"]
    table(f"Batches of different sizes, {WORKERS} workers", header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batches", type=int, default=1000, help="of the long epoch (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=20, help="short ones, of 50 batches (default: %(default)s)")
    parser.add_argument("--side", type=int, default=64, help="of an image (default: %(default)s)")
    parser.add_argument("--odd", type=int, default=100, help="batches that differ (default: %(default)s)")
    options = parse(parser, {"batches": 100, "epochs": 2, "odd": 60})
    size = f"{BATCH * 3 * options.side**2 / 1e6:.2f} MB"
    for title, persistence, epochs, batches, look in (
        (f"{options.batches} batches of {size}", (False,), 1, options.batches, 20),
        (f"{options.epochs} epochs of 50 batches of {size}", (False, True), options.epochs, 50, 25),
    ):
        kinds = itertools.product(LOADERS, persistence)
        report(title, {(name, kept): fresh(name, kept, epochs, batches, look, options.side) for name, kept in kinds})
    report_odd(options.odd)


if __name__ == "__main__":
    main()
