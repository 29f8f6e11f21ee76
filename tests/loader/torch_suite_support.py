"""Data sets and functions of the acceptance tests, in a module that worker processes can import."""

from __future__ import annotations

import collections
import multiprocessing
import os
import random
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from loader_support import Range
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, get_worker_info

import penstock as ps

BOTH = (TorchDataLoader, ps.DataLoader)
METHODS = ("fork", "forkserver", "spawn")

WORKERS: dict[str, dict[str, Any]] = {
    "fork": {"num_workers": 2, "multiprocessing_context": "fork"},
    "forkserver": {"num_workers": 2, "multiprocessing_context": "forkserver"},
    "spawn": {"num_workers": 2, "multiprocessing_context": "spawn"},
    "persistent": {"num_workers": 2, "persistent_workers": True},
}
"""Arguments that both classes understand."""

OURS: dict[str, dict[str, Any]] = {
    "inline": {},
    "thread": {"num_workers": 2, "executor": "thread"},
    "threads persist": {"num_workers": 2, "executor": "thread", "persistent_workers": True},
    **{name: {**how, "executor": "process"} for name, how in WORKERS.items()},
}
"""Arguments of ours: every executor, every start method."""

FAST = ("inline", "thread", "threads persist", "fork", "persistent")
"""Those of `OURS` that start without importing torch again."""


def number() -> int:
    """Of the worker that runs this; -1 in none."""
    info = get_worker_info()
    return -1 if info is None else info.id


class Maker(Range):
    """Each item says which worker made it."""

    def __getitem__(self, index: Any) -> Any:
        return index, number()


class Samples(Range):
    """Items from a list, also bad ones."""

    def __init__(self, samples: list[Any]) -> None:
        super().__init__(len(samples))
        self.samples = samples

    def __getitem__(self, index: Any) -> Any:
        return self.samples[index]


class Parts(IterableDataset[Any]):
    """Worker w yields ``counts[w]`` items; without workers all of them."""

    def __init__(self, counts: list[int]) -> None:
        self.counts = counts

    def __iter__(self) -> Iterator[Any]:
        worker = number()
        parts = range(len(self.counts)) if worker < 0 else [worker]
        for part in parts:
            for item in range(self.counts[part]):
                yield 100 * part + item


class Lies(IterableDataset[int]):
    """Its ``__len__`` is what it is told."""

    def __init__(self, n: int, said: int) -> None:
        self.n = n
        self.said = said

    def __len__(self) -> int:
        return self.said

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(first, self.n, step))


class Draws(Range):
    """Seeds and draws of the global generators, in a worker."""

    def __getitem__(self, index: Any) -> Any:
        info = get_worker_info()
        assert info is not None
        drawn = [torch.rand(()).item(), random.random(), float(np.random.rand())]
        return torch.initial_seed(), info.seed, info.id, drawn


class Info(Range):
    """What ``get_worker_info()`` says, and what ``note_info`` has noted on the data set."""

    noted: Any = None

    def __getitem__(self, index: Any) -> Any:
        info = get_worker_info()
        if info is None:
            return None
        return info.id, info.num_workers, info.seed == torch.initial_seed(), info.dataset is self, self.noted


def note_info(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert info.id == worker
    for name in ("id", "something_new"):
        try:
            setattr(info, name, 3)
        except Exception:
            continue
        raise AssertionError(f"{name} was assigned")
    assert all(f"{name}=" in repr(info) for name in ("id", "num_workers", "seed", "dataset"))
    if multiprocessing.parent_process() is not None:  # threads share the main program's generators
        assert info.seed == torch.initial_seed()
    info.dataset.noted = worker  # type: ignore[attr-defined]


class Own(Range):
    """Each item says how many this copy of the data set has made, and what the main program wrote into it."""

    made = 0
    word = "at the start"

    def __getitem__(self, index: Any) -> Any:
        self.made += 1
        return number(), self.made, self.word


class Again(IterableDataset[Any]):
    """Counts its passes on the worker's own copy."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        for item in range(self.n):
            yield number(), self.passes, item


class OddError(Exception):
    """Its constructor takes more than a text."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code


class StubbornError(ValueError):
    """Cannot be pickled."""

    def __reduce__(self) -> Any:
        raise TypeError("not for travel")


class LockedError(RuntimeError):
    """Holds something that cannot be pickled."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class Raises(Range):
    """One kind of error for each index; 0 is good."""

    def __getitem__(self, index: Any) -> Any:
        if index == 1:
            raise KeyError("no such key\nwith a second line")
        if index == 2:
            raise OddError(7, "odd")
        if index == 3:
            raise StubbornError("stubborn")
        if index == 4:
            raise LockedError("locked")
        if index == 5:
            raise FileNotFoundError(2, "No such file", "/nowhere")
        if index == 6:
            raise UnicodeDecodeError("utf-8", b"x", 0, 1, "bad byte")
        if index == 7:
            raise MemoryError("too large")
        if index == 8:
            raise NotImplementedError
        if index == 9:
            raise IndexError("past the end")
        return index


class BadStream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        raise LookupError("no stream here")


def bad_worker(worker: int) -> None:
    raise ArithmeticError(f"worker {worker} will not")


class Dies(Range):
    """Ends its worker by a signal at one index."""

    def __init__(self, n: int, at: int, signal: int) -> None:
        super().__init__(n)
        self.at = at
        self.signal = signal

    def __getitem__(self, index: Any) -> Any:
        if index == self.at:
            os.kill(os.getpid(), self.signal)
            time.sleep(60)
        return index


class Exits(Range):
    """Ends its worker by ``os._exit``."""

    def __getitem__(self, index: Any) -> Any:
        if index == 3:
            os._exit(7)
        return index


class Stuck(Range):
    """Index 0 waits until a file is there."""

    def __init__(self, n: int, file: Path) -> None:
        super().__init__(n)
        self.file = file

    def __getitem__(self, index: Any) -> Any:
        deadline = time.monotonic() + 60
        while index == 0 and not self.file.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return index


class Affinity(Range):
    def __getitem__(self, index: Any) -> Any:
        return sorted(os.sched_getaffinity(0))


def on_one_core(worker: int) -> None:
    os.sched_setaffinity(0, [sorted(os.sched_getaffinity(0))[-1]])


class Threads(Range):
    """Works with torch's own threads, which a fork may have lost."""

    def __getitem__(self, index: Any) -> Any:
        weights = torch.ones(8, 3, 3, 3)
        return torch.nn.functional.conv2d(torch.ones(1, 3, 64, 64), weights).sum().item() + torch.get_num_threads() * 0


class Nested(Range):
    """Each item is made by a loader inside the worker."""

    def __init__(self, n: int, kind: Any) -> None:
        super().__init__(n)
        self.kind = kind

    def __getitem__(self, index: Any) -> Any:
        return sum(batch.sum() for batch in self.kind(Range(index + 1), batch_size=2))


class Many(Range):
    """Fetches whole batches, torch's way."""

    def __getitems__(self, indices: list[Any]) -> list[Any]:
        return [(index, len(indices)) for index in indices]


class Shared(Range):
    """All items are views of one storage, of which collating must not resize anything."""

    def __getitem__(self, index: Any) -> Any:
        return torch.arange(12).view(3, 4)[index % 3]


class Point(NamedTuple):
    x: int
    y: Any


class MyList(list[Any]):
    pass


class MyDict(dict[str, Any]):
    pass


class Locked(MyList):
    """A list of which no copy can be made with other items."""

    def __init__(self, items: Any = ()) -> None:
        if not isinstance(items, tuple):
            raise TypeError("only from a tuple")
        super().__init__(items)

    def __copy__(self) -> Any:
        raise TypeError("no copies")


def shape(batch: Any) -> Any:
    """Values with their types, to be compared."""
    if isinstance(batch, torch.Tensor):
        dense = batch.to_dense() if batch.layout != torch.strided else batch
        return str(batch.dtype), str(batch.layout), list(batch.shape), dense.tolist()
    if isinstance(batch, np.ndarray):
        return "array", str(batch.dtype), batch.tolist()
    if isinstance(batch, Mapping):
        return type(batch).__name__, {name: shape(value) for name, value in batch.items()}
    if isinstance(batch, collections.abc.Sequence) and not isinstance(batch, str | bytes):
        return type(batch).__name__, [shape(value) for value in batch]
    return type(batch).__name__, batch


def outcomes(loader: Any, limit: int = 200) -> list[Any]:
    """One pass that goes on after errors: batches, and of errors the built-in type that one would catch."""
    result: list[Any] = []
    iterator = iter(loader)
    try:
        for _ in range(limit):
            try:
                result.append(shape(next(iterator)))
            except StopIteration:
                return result
            except Exception as error:
                result.append(type(error))
        raise AssertionError(f"no end after {limit} batches")
    finally:
        end(iterator)


def end(iterator: Any) -> None:
    """End the workers now: an error that is kept alive keeps its iterator alive."""
    if hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()
