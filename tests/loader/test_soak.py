"""Many loaders over many epochs, left and broken at random: at the end there is what there was at the beginning."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import random
import re
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from penstock import DataLoader

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:.*are being kept")

LOADERS, EPOCHS = 20, 50
SLACK = 24 << 20
"""Bytes of anonymous memory: fragments, which come and go. A batch lost in each epoch would be 100 MB."""


class Vectors(Dataset[Any]):
    """2 MB a batch of eight; some samples are bad."""

    pure = True

    def __init__(self, bad: bool) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> Any:
        if self.bad and index % 37 == 5:
            raise LookupError(f"sample {index} is bad")
        return torch.full((65_536,), float(index)), index, str(index)


class Items(IterableDataset[Any]):
    def __iter__(self) -> Any:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(first, 80, step):
            yield torch.full((65_536,), float(index)), index, str(index)


HOW: list[dict[str, Any]] = [
    {},
    {"executor": "thread", "num_workers": 2},
    {"executor": "thread", "num_workers": 3, "persistent_workers": True},
    {"num_workers": 2},
    {"num_workers": 2, "dispatch": "chunk"},
    {"num_workers": 2, "persistent_workers": True},
    {"num_workers": 1, "threads_per_worker": 2},
    {"num_workers": 2, "multiprocessing_context": "forkserver", "persistent_workers": True},
    {"num_workers": 2, "on_worker_death": "restart"},
]


def anonymous() -> int:
    """Anonymous memory in bytes, without what the allocator keeps for later."""
    ctypes.CDLL(None).malloc_trim(0)
    found = re.search(r"^Anonymous:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def children() -> set[int]:
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):  # a thread that has just ended
            found |= {int(pid) for pid in (task / "children").read_text().split()}
    return found


def left() -> tuple[set[str], set[str], set[int], set[str]]:
    """Descriptors by what they refer to, threads, children (zombies too), entries of /dev/shm by us."""
    descriptors = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            descriptors.add(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
        except OSError:
            continue  # the listing's own
    names = {thread.name for thread in threading.enumerate()}
    shared = {name for name in os.listdir("/dev/shm") if "penstock" in name or str(os.getpid()) in name}
    return descriptors, names, children(), shared


def mapped() -> int:
    """Maps of shared memory files of ours."""
    return Path("/proc/self/maps").read_text().count("memfd:penstock")


def one_epoch(loader: Any, rng: random.Random, how: dict[str, Any]) -> int:
    """Batches had; stops at random, and kills a worker where that is made good."""
    stop = rng.choice([None, None, 0, 1, rng.randrange(10)])
    held: list[Any] = []
    had = 0
    iterator = iter(loader)
    while stop is None or had < stop:
        try:
            batch = next(iterator)
        except StopIteration:
            break
        except LookupError:
            had += 1
            continue
        assert all(bool((row == index).all()) for row, index in zip(batch[0][:, ::4096], batch[1], strict=True))
        held = [*held[-rng.randrange(1, 5) :], batch]
        had += 1
        if "on_worker_death" in how and had == 3:
            os.kill(iterator._workers[0].pid, signal.SIGKILL)
    return had


def live(rng: random.Random, loaders: int, epochs: int) -> int:
    """So many loaders and epochs; how many batches came."""
    had = 0
    for number in range(loaders):
        how = HOW[number % len(HOW)]
        stream = number % 5 == 4 and not {"on_worker_death", "threads_per_worker", "dispatch"} & set(how)
        data: Any = Items() if stream else Vectors(bad=rng.random() < 0.4)
        loader: Any = DataLoader(
            data, 8, shuffle=None if stream else True, **({} if stream else {"seed": number}), **how
        )
        for _ in range(epochs * (number + 1) // loaders - epochs * number // loaders):
            had += one_epoch(loader, rng, how)
        if rng.random() < 0.3:
            iterator = iter(loader)
            with suppress(LookupError):
                next(iterator, None)
            del loader  # the iterator goes on without it
            if rng.random() < 0.5:
                iterator.loop = iterator  # only the garbage collector finds it
            del iterator
        elif rng.random() < 0.5:
            loader.close()
    return had


def test_nothing_is_left_after_many_loaders() -> None:
    live(random.Random(0), len(HOW), 2 * len(HOW))  # whatever is started once: the forkserver, torch's own helpers
    live(random.Random(1), len(HOW), 2 * len(HOW))
    gc.collect()
    time.sleep(0.1)
    before, maps, memory = left(), mapped(), anonymous()
    assert live(random.Random(2), LOADERS, EPOCHS) > 100
    end = time.monotonic() + 5
    while True:
        gc.collect()
        more = [now - then for now, then in zip(left(), before, strict=True)]
        if not any(more) or time.monotonic() > end:
            break
        time.sleep(0.05)
    assert not any(more), f"left behind: {more}"
    assert mapped() <= maps
    assert anonymous() - memory < SLACK, (memory, anonymous())


def test_the_last_workers_leave_no_descriptor() -> None:
    multiprocessing.active_children()
    before = left()[0]
    assert len(list(DataLoader(Vectors(bad=False), 8, num_workers=2))) == 10
    gc.collect()
    assert left()[0] <= before
