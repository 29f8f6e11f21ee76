"""Data sets and helpers of the loader tests, in a module that worker processes can import."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import penstock as ps
from penstock.loader.messages import BatchResult
from penstock.loader.workerinfo import enter

EXECUTORS = {"inline": 0, "thread": 2, "process": 2}
"""Executors by name, with the number of workers that the tests give them."""


@contextmanager
def worker_scope(info: Any) -> Iterator[None]:
    """This thread is a worker, and afterwards what it was."""
    before = get_worker_info()
    enter(info)
    try:
        yield
    finally:
        enter(before)


class Range(Dataset[Any]):
    """0, 1, 2, ..."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: Any) -> Any:
        return index


class Draws(Dataset[dict[str, Any]]):
    """Each item says its index and what `penstock.generator` draws for it."""

    pure = True

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = ps.generator()
        return {"index": index, "own": generator.random(2).tolist(), "more": int(ps.generator().integers(1 << 40))}


class GlobalDraws(Draws):
    """And what the global generators draw."""

    pure = False

    def __getitem__(self, index: int) -> dict[str, Any]:
        drawn = [random.random(), float(np.random.rand()), torch.rand((), dtype=torch.float64).item()]
        return {**super().__getitem__(index), "global": drawn}


class Squares(Dataset[int]):
    """0, 1, 4, 9, ...; draws nothing."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.n:
            raise IndexError(index)
        return index * index


class Faulty(Squares):
    """Raises at some indices."""

    def __init__(self, n: int, bad: set[int], error: type[Exception] = KeyError) -> None:
        super().__init__(n)
        self.bad = bad
        self.error = error

    def __getitem__(self, index: int) -> int:
        if index in self.bad:
            raise self.error(f"sample {index} is bad")
        return super().__getitem__(index)


class Slow(Squares):
    """Takes its time at some indices."""

    def __init__(self, n: int, slow: dict[int, float]) -> None:
        super().__init__(n)
        self.slow = slow

    def __getitem__(self, index: int) -> int:
        time.sleep(self.slow.get(index, 0))
        return super().__getitem__(index)


class Where(Squares):
    """Says which thread and worker made the item, and of what type ``get_worker_info().dataset`` is."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.001)
        info = get_worker_info()
        return threading.current_thread().name, -1 if info is None else info.id, type(info and info.dataset).__name__


class Pair(NamedTuple):
    left: int
    right: str


class Pairs(Squares):
    pure = True

    def __getitem__(self, index: int) -> Any:
        return Pair(index, f"item {index}")


class Nested(Squares):
    def __getitem__(self, index: int) -> Any:
        array = np.full((2, 2), index, dtype=np.float32)
        return {
            "image": array,
            "meta": {"index": index, "name": str(index)},
            "list": [torch.tensor(index), 0.5 * index],
        }


class Stream(IterableDataset[int]):
    """A foreign iterable data set that shards itself by worker, with or without a length."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(first, self.n, step))


class FailingStream(Stream):
    def __iter__(self) -> Iterator[int]:
        yield from range(3)
        raise LookupError("the stream broke")


def draw_load(record: ps.Record) -> tuple[int, float]:
    """A ``load`` that augments by `penstock.generator` alone."""
    return record.row, float(ps.generator().random())


draw_load.pure = True  # type: ignore[attr-defined]


def global_load(record: ps.Record) -> tuple[int, float, float]:
    """A ``load`` that draws from global generators, as torchvision's transforms do."""
    return record.row, random.random() + float(np.random.rand()), torch.rand(()).item()


def sum_collate(samples: list[int]) -> int:
    return sum(samples)


def noisy_collate(samples: list[Any]) -> Any:
    """Draws while it collates, as MixUp does."""
    return [sample["index"] for sample in samples], float(ps.generator().random())


def bad_collate(samples: list[int]) -> int:
    if 4 in samples:
        raise ArithmeticError("four does not collate")
    return sum(samples)


def bad_init(worker: int) -> None:
    raise ValueError(f"worker {worker} cannot start")


def noting_init(worker: int) -> None:
    """Leaves a mark on the worker's own copy of the data set."""
    info = get_worker_info()
    assert info is not None
    info.dataset.n = 3 + worker  # type: ignore[attr-defined]


def plain(batch: Any) -> Any:
    """A batch as nested lists, dicts and numbers, to be compared bit for bit."""
    if isinstance(batch, torch.Tensor | np.ndarray):
        return batch.tolist()
    if isinstance(batch, dict):
        return {name: plain(value) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [plain(value) for value in batch]
    return batch


def batches(loader: Any) -> list[Any]:
    """One pass."""
    return [plain(batch) for batch in loader]


def outcomes(loader: Any, limit: int = 1000) -> list[Any]:
    """One pass, of a loader or an executor, that goes on after errors: batches, and of errors their types' names."""
    result: list[Any] = []
    with ended(iter(loader)) as iterator:
        for _ in range(limit):
            try:
                made = next(iterator)
                result.append(plain(made.batch if isinstance(made, BatchResult) else made))
            except StopIteration:
                return result
            except Exception as error:
                result.append(type(error).__name__)
    raise AssertionError(f"no end after {limit} batches: {result[-3:]}")


@contextmanager
def ended(iterator: Any) -> Iterator[Any]:
    """An iterator whose workers end here. Errors that they raise keep it alive, and torch takes five seconds for each
    worker of an iterator that the garbage collector finds when others have been forked since.
    """
    try:
        yield iterator
    finally:
        if hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()
