"""The process executor: torch's own worker processes, which are told each sample's key with its index.

Batches are planned in the main process, so batch k is the same whichever worker makes it. Without a seed the workers
get plain indices and the data set itself, and everything follows torch's rules to the letter.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, get_worker_info

from penstock.loader.delivery import WORKER_NAMES
from penstock.loader.fetch import Fetch, Task

__all__ = ["Workers"]


class _Samples(list[Any]):
    """Samples of a batch on their way to the collate function, which needs the task for its generator."""

    def __init__(self, samples: list[Any], task: Task) -> None:
        super().__init__(samples)
        self.task = task


class _Keyed(Dataset[Any]):
    """A data set whose index is a whole task."""

    def __init__(self, fetch: Fetch) -> None:
        self.fetch = fetch

    def __getitem__(self, task: Task) -> Any:
        return self.__getitems__(task)

    def __getitems__(self, task: Task) -> _Samples:
        return _Samples(self.fetch.samples(task), task)

    def collate(self, samples: _Samples) -> Any:
        return self.fetch.collate(samples, samples.task)


class _Init:
    """``worker_init_fn``: the user's, who expects the user's own data set in ``get_worker_info()``."""

    def __init__(self, init: Callable[[int], object] | None) -> None:
        self.init = init

    def __call__(self, number: int) -> None:
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, _Keyed):
            object.__setattr__(info, "dataset", info.dataset.fetch.dataset)  # torch makes it read-only for users
        if self.init is not None:
            self.init(number)


class _Feed:
    """What torch's loader takes for a batch sampler: the tasks of the pass at hand."""

    def __init__(self, keyed: bool, batched: bool) -> None:
        self._keyed = keyed
        self._batched = batched
        self.tasks: Iterator[Task] = iter(())

    def __iter__(self) -> Iterator[Any]:
        for task in self.tasks:
            if self._keyed:
                yield task
            else:
                yield task.indices if self._batched else task.indices[0]


class Workers:
    """torch's loader over keyed samples, kept from pass to pass so that persistent workers persist.

    Args:
        fetch: makes the samples and batches, in the workers.
        keyed: whether samples have keys (a loader with a seed).
        options: the arguments of torch's DataLoader that concern workers.
    """

    def __init__(self, fetch: Fetch, *, keyed: bool, options: dict[str, Any]) -> None:
        self.keyed = keyed
        self.passes = 0
        self._feed = _Feed(keyed, fetch.batched)
        dataset: Any = fetch.dataset
        collate_fn: Callable[[Any], Any] = fetch.collate_fn
        if keyed:
            dataset = _Keyed(fetch)
            collate_fn = dataset.collate
            options = {**options, "worker_init_fn": _Init(options["worker_init_fn"])}
        order = {"batch_sampler": self._feed} if fetch.batched else {"batch_size": None, "sampler": self._feed}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what there is to say about these arguments, our loader has said
            self._loader: DataLoader[Any] = DataLoader(dataset, collate_fn=collate_fn, **order, **options)

    def batches(self, tasks: Iterator[Task]) -> Iterator[Any]:
        """The batches of one pass."""
        self._feed.tasks = tasks
        if not self._loader.persistent_workers:
            return iter(self._loader)
        self.passes += 1
        return _Persistent(iter(self._loader), self)


class _Persistent:
    """One pass of persistent workers, for which torch has one iterator for ever: an older pass must not take the
    batches of a newer one.
    """

    def __init__(self, batches: Iterator[Any], workers: Workers) -> None:
        self._batches = batches
        self._workers = workers
        self._number = workers.passes

    def __getattr__(self, name: str) -> Any:
        if name in WORKER_NAMES:
            return getattr(self._batches, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __iter__(self) -> _Persistent:
        return self

    def __next__(self) -> Any:
        if self._number != self._workers.passes:
            raise RuntimeError("a newer iterator of this DataLoader has taken over its persistent workers")
        return next(self._batches)
