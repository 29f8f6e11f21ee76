"""A long and untidy life with loaders, in a module that worker processes can import; also as a program of its own."""

from __future__ import annotations

import gc
import os
import random
import signal
import time
from contextlib import suppress
from typing import Any

import torch
from leak_support import anonymous, assert_nothing_more, left, mapped
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from penstock import DataLoader

SLACK = 24 << 20
"""Bytes of anonymous memory: fragments, which come and go. A batch lost in each of 20 epochs would be 40 MB."""


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
    {"num_workers": 2, "persistent_workers": True},
    {"num_workers": 1, "threads_per_worker": 2},
    {"num_workers": 2, "multiprocessing_context": "forkserver", "persistent_workers": True},
    {"num_workers": 2, "on_worker_death": "restart"},
]


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
        stream = number % 5 == 4 and not {"on_worker_death", "threads_per_worker"} & set(how)
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


def soak(loaders: int, epochs: int) -> None:
    """Raises AssertionError if anything is left behind, with what it is."""
    live(random.Random(0), len(HOW), 2 * len(HOW))  # whatever is started once: the forkserver, torch's own helpers
    live(random.Random(1), len(HOW), 2 * len(HOW))
    gc.collect()
    time.sleep(0.1)
    before, maps, memory = left(), mapped(), anonymous()
    had = live(random.Random(2), loaders, epochs)
    assert had > 100, f"{had} batches"
    assert_nothing_more(before)
    assert mapped() <= maps, f"{mapped()} maps of shared memory, {maps} before"
    grown = anonymous() - memory
    print(f"{had} batches; anonymous memory {memory} bytes, then {memory + grown}")
    assert grown < SLACK, f"anonymous memory went from {memory} to {memory + grown} bytes"
