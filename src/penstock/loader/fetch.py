"""From indices to a batch: the one piece of code that every executor runs.

Invariant: what a sample becomes depends on its index and its key, never on where or next to what it is made. Collation
depends on the batch's first key.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Subset

from penstock.datasets.base import BatchedDataset
from penstock.order.hashing import mix
from penstock.random import sample_scope

__all__ = ["Fetch", "Task", "preserved_generators"]


class Task(NamedTuple):
    """One batch to be made: sample indices, the keys of their generators, and where the data set stood when the pass
    began (None for data sets that have no place of their own). The place travels with the task, so a data set that was
    moved on meanwhile still gives the batches of this pass.
    """

    indices: list[Any]
    keys: list[int]
    place: Any = None

    def part(self, begin: int, end: int) -> Task:
        """The same for some of the samples."""
        return Task(self.indices[begin:end], self.keys[begin:end], self.place)


class Fetch:
    """``fetch(task) -> batch``; picklable if the data set and the collate function are.

    Args:
        dataset: map-style.
        collate_fn: takes the list of samples, or the one sample where batching is off.
        batched: False hands each task's only index to the data set and its sample to ``collate_fn``.
        seed_globals: seed Python's, NumPy's and torch's global generators for each sample from its key, for
            transforms that draw from those. Whoever calls sees to their being restored.
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[Any], Any], *, batched: bool, seed_globals: bool) -> None:
        self.dataset = dataset
        self.collate_fn = collate_fn
        self.batched = batched
        self.seed_globals = seed_globals

    @property
    def _batched_dataset(self) -> bool:
        """Whether the data set makes whole batches: a promise of ours, which a method of that name elsewhere is not."""
        return isinstance(self.dataset, BatchedDataset) and self.dataset.load_samples is not None  # type: ignore[attr-defined]

    @property
    def divisible(self) -> bool:
        """Whether the samples of a batch may be asked for in several calls."""
        return self.batched and (self._batched_dataset or _bulk(self.dataset) is None)

    def __call__(self, task: Task) -> Any:
        return self.collate(self.samples(task), task)

    def samples(self, task: Task) -> list[Any]:
        """The samples of a task, or of a part of one."""
        if self._batched_dataset:
            return self._load(task)
        getitems = _bulk(self.dataset) if self.batched else None
        if getitems is not None and task.keys:
            with self._scope(task.keys[0]):
                samples = getitems(task.indices)
                return samples
        return [self._sample(index, key) for index, key in zip(task.indices, task.keys, strict=True)]

    def collate(self, samples: list[Any], task: Task) -> Any:
        """The batch that the samples make."""
        with self._scope(mix(task.keys[0], 1) if task.keys else 0):
            return self.collate_fn(samples if self.batched else samples[0])

    def _load(self, task: Task) -> list[Any]:
        at = {} if task.place is None else {"place": task.place}
        if not self.seed_globals:
            samples: list[Any] = self.dataset.load_samples(task.indices, task.keys, **at)
            return samples
        samples = []
        for index, key in zip(task.indices, task.keys, strict=True):
            with self._scope(key):
                samples += self.dataset.load_samples([index], [key], **at)
        return samples

    def _sample(self, index: Any, key: int) -> Any:
        with self._scope(key):
            try:
                return self.dataset[index]
            except Exception as error:
                error.add_note(f"while loading sample {index!r} of {type(self.dataset).__name__}")
                raise

    @contextmanager
    def _scope(self, key: int) -> Iterator[None]:
        if self.seed_globals:
            random.seed(key)
            np.random.seed(key & 0xFFFFFFFF)
            torch.default_generator.manual_seed(key)
        with sample_scope(key):
            yield


def _bulk(dataset: Any) -> Callable[[Sequence[Any]], list[Any]] | None:
    """``__getitems__`` where that is more than a loop. It costs every sample its own key: a batch has one scope."""
    if type(dataset) is Subset and _bulk(dataset.dataset) is None:
        return None
    return getattr(dataset, "__getitems__", None)


@contextmanager
def preserved_generators() -> Iterator[None]:
    """Python's, NumPy's and torch's global generators are afterwards what they were before."""
    python, legacy, own = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)
        torch.set_rng_state(own)
