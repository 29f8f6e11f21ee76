"""`DataLoader`: torch's, with executors that give the same batches, and a state that resumes at any of them.

    sampler -> passes -> tasks (indices, keys) -> executor -> batches
                 |                                              |
                 `------------- state(batches delivered) -------'

Invariant: batches are planned before any worker is thought of, and the state is a function of the batches that the
consumer has received, never of what was prefetched.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterableDataset, Sampler

from penstock import distributed
from penstock.datasets.base import StreamDataset
from penstock.errors import ConfigError, StateError
from penstock.loader.collate import collate
from penstock.loader.delivery import Delivery, Progress, pinned, skip_batches
from penstock.loader.fetch import Fetch, Task
from penstock.loader.inline import InlineBatches
from penstock.loader.options import check_options, default_sampler, warn_threads
from penstock.loader.process import Workers
from penstock.loader.source import batch_source, plan, refuse_double_split, stream_source
from penstock.loader.thread import ThreadBatches, ThreadPool, read_ahead
from penstock.samplers.base import BatchPass, EpochBatchSampler
from penstock.samplers.batch import BatchSampler
from penstock.samplers.identity import fingerprint_of
from penstock.samplers.sequential import SequentialSampler
from penstock.state import STATE_VERSION, State, check_state, read_int

__all__ = ["DataLoader"]

T_co = TypeVar("T_co", covariant=True)

_WORKER_OPTIONS = (
    *("num_workers", "pin_memory", "pin_memory_device", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("generator", "prefetch_factor", "persistent_workers", "in_order"),
)


class DataLoader(TorchDataLoader[T_co]):
    """A ``torch.utils.data.DataLoader`` whose batches do not depend on what makes them, and that resumes exactly.

    All arguments of torch's, with torch's meaning, defaults and errors, and:

    Args:
        shuffle: besides True and False, ``"global"`` or ``"block"``: our orders, in O(1) memory (with seed 0 if none
            is given).
        executor: ``"inline"`` makes batches in the caller's thread; ``"thread"`` in ``num_workers`` threads that share
            the data set, all of them on the next batch first; ``"process"`` in torch's worker processes. ``"auto"`` is
            inline without workers, else process.
        seed: one truth: order and every sample's `penstock.generator` are functions of (seed, epoch, position), in
            every executor. Where a data set does not declare itself ``pure``, inline and process workers also seed
            Python's, NumPy's and torch's global generators for each sample; the caller's are left as they were. By
            default the seed of a Penstock sampler or data set; without one, torch's own rules.

    Raises:
        ValueError: whatever torch refuses, in its words, and options that make no sense for an executor.
        PartitionError: both the data set and the sampler deal samples to ranks.

    With a seed, ``epoch`` moves on by itself at each new ``iter()`` unless `set_epoch` was called; it is readable, so a
    resumed loop starts there::

        loader.load_state_dict(state)                     # before or after iter(), in any process
        for epoch in range(loader.epoch, 90):
            loader.set_epoch(epoch)                       # keeps the position of the epoch just loaded
            for images, labels in loader:
                state = loader.state_dict()               # a few hundred bytes, at any batch

    In this version: ``executor="ray"`` does not exist yet; ``get_worker_info()`` is None in threads; iterable data sets
    other than ours are made by torch's own code (and by one thread in the thread executor), and resume by skipping.
    """

    def __init__(
        self,
        dataset: Dataset[T_co],
        batch_size: int | None = 1,
        shuffle: bool | str | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        executor: str = "auto",
        seed: int | None = None,
    ) -> None:
        check_options(executor, num_workers, multiprocessing_context, shuffle, seed, generator)
        if sampler is None and batch_sampler is None and not isinstance(dataset, IterableDataset):
            sampler = default_sampler(dataset, shuffle, seed, generator)
            shuffle = None
        refuse_double_split(dataset, sampler if sampler is not None else batch_sampler)
        self.executor = executor
        self.seed = None if seed is None else operator.index(seed)
        super().__init__(
            dataset,
            batch_size,
            bool(shuffle) if shuffle is not None else None,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            in_order=in_order,
        )
        if collate_fn is None and self._auto_collation:
            self.collate_fn = collate
        self._source = self._make_source()
        self._progress: Progress | None = None
        self._skip = 0
        self._pool: ThreadPool | None = None
        self._workers: Workers | None = None

    def _make_source(self) -> EpochBatchSampler | None:
        """Our batches; None for an iterable data set that only torch can batch."""
        if isinstance(self.dataset, IterableDataset):
            if not isinstance(self.dataset, StreamDataset):
                if self.seed is not None:
                    raise ConfigError(
                        f"seed= has no effect on {type(self.dataset).__name__}: an iterable data set draws and "
                        "orders as it likes. Leave seed out, or make it a map-style data set"
                    )
                return None
            return stream_source(self.dataset, self.batch_size, self.drop_last)
        if type(self.batch_sampler) is torch.utils.data.BatchSampler and self.batch_size is not None:
            ours = BatchSampler(self.sampler, self.batch_size, self.drop_last)
            object.__setattr__(self, "batch_sampler", ours)  # torch guards the attribute against users
        return batch_source(self.sampler, self.batch_sampler)

    # Epoch and state.

    @property
    def epoch(self) -> int:
        """The epoch that runs, or will run next."""
        if self._source is None:
            return int(getattr(self.dataset, "epoch", 0))
        if self._progress is not None and self._progress.run is not None and self._source.running:
            return self._progress.run.epoch
        return self._source.peek().epoch

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next ``iter()``. The epoch of a state just loaded keeps its position."""
        if self._source is not None:
            if self._shuffles_a_share:
                self.dataset.set_epoch(epoch)  # type: ignore[attr-defined]
            self._source.set_epoch(epoch)
        elif hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        else:
            raise ConfigError(f"{type(self.dataset).__name__} is iterable-style and has no set_epoch of its own")

    def state_dict(self) -> State:
        """Where the consumer is: JSON-serialisable, a few hundred bytes with Penstock's samplers and data sets."""
        progress = self._progress
        if self._source is None:
            batches = self._skip if progress is None else progress.count
            return {"version": STATE_VERSION, **self._identity(), **self._layout(), "batches": batches}
        if progress is not None and progress.run is not None and self._source.running:
            if progress.count and not self.in_order:
                raise StateError("in_order=False cannot be resumed in mid-epoch in this version: use in_order=True")
            sampler = progress.run.state(progress.count)
        else:
            sampler = self._source.peek().state(0)
        state = {"version": STATE_VERSION, **self._identity(), "sampler": sampler}
        if self._shuffles_a_share:
            state["dataset"] = self.dataset.state_dict()  # type: ignore[attr-defined]
        return state

    def load_state_dict(self, state: Mapping[str, Any], *, allow_growth: bool = False) -> None:
        """Go on from a state at the next ``iter()``; an iterator that runs is detached.

        Args:
            state: from `state_dict`, of any rank: all save at the same step.
            allow_growth: accept a manifest to which rows were appended since, see `RankDataset.load_state_dict`; for
                loaders over such a data set.

        Raises:
            StateError: the state belongs to other data, another order or another seed; it says what differs.
            ConfigError: allow_growth where the order is not the data set's own.
        """
        if allow_growth:
            self._load_grown(state)
            return
        check_state(state, {"version": STATE_VERSION, **self._identity()}, of="DataLoader")
        if self._source is None:
            check_state(state, self._layout(), of="DataLoader")
            self._skip = read_int(state, "batches", of="DataLoader")
        elif "sampler" not in state:
            raise StateError("this is no state of such a DataLoader: 'sampler' is missing")
        else:
            if self._shuffles_a_share:
                self.dataset.load_state_dict(state.get("dataset"))  # type: ignore[attr-defined]
            self._source.load_state_dict(state["sampler"])
        self._progress = None

    def _load_grown(self, state: Mapping[str, Any]) -> None:
        if self._source is None or self._shuffles_a_share or not hasattr(self._samples, "start_pass"):
            raise ConfigError("allow_growth needs a data set with an order of its own: RankDataset, MPDataset")
        check_state(state, {"version": STATE_VERSION, "seed": self.seed}, of="DataLoader")
        self._samples.load_state_dict(state.get("sampler"), allow_growth=True)
        self._source.finish()
        self._progress = None

    def _identity(self) -> State:
        return {"seed": self.seed, "fingerprint": fingerprint_of(self.dataset)}

    def _layout(self) -> State:
        """What the batches of a foreign iterable data set depend on besides itself: it shards itself by worker."""
        workers = self.num_workers if self._how == "process" else 0
        return {"num_workers": workers, "batch_size": self.batch_size, "drop_last": self.drop_last}

    # Iteration.

    def __iter__(self) -> Iterator[T_co]:  # type: ignore[override]
        if self._source is None:
            return self._stream()
        if self._seeded and self._source.running:
            self._advance(self._source)
        if self._shuffles_a_share:
            self.dataset.start_pass()  # type: ignore[attr-defined]
        run = self._source.start()
        self._progress = progress = Progress(run)
        return Delivery(self._make_batches(run), progress, self._finished)

    @property
    def _seeded(self) -> bool:
        return self.seed is not None or (self._source is not None and self._source.peek().seed is not None)

    @property
    def _how(self) -> str:
        if self.executor != "auto":
            return self.executor
        return "process" if self.num_workers else "inline"

    def _finished(self, progress: Progress) -> None:
        """The consumer has had everything: what is next is a whole pass, with a seed that of the next epoch.

        A StopIteration that escapes from a data set ends a loop too, as in torch; that epoch is not had to its end.
        """
        if self._progress is progress and (progress.run is None or progress.count >= _length(progress.run)):
            self._progress = None
            self._skip = 0
            if self._source is not None:
                self._advance(self._source) if self._seeded else self._source.finish()

    def _advance(self, source: EpochBatchSampler) -> None:
        """Go on to what comes next, unless somebody has chosen it since."""
        source.advance()
        if self._shuffles_a_share and self.dataset.running:  # type: ignore[attr-defined]
            self.dataset.next_mini_epoch()  # type: ignore[attr-defined]

    def check_worker_number_rationality(self) -> None:
        """torch's warning when there are more worker processes than cores; threads are none."""
        if self.executor != "thread":
            super().check_worker_number_rationality()

    def __getstate__(self) -> dict[str, Any]:
        # What runs stays here: threads, workers and a pass that is under way belong to this process.
        return {**self.__dict__, "_progress": None, "_pool": None, "_workers": None}

    def _make_batches(self, run: BatchPass) -> Iterator[Any]:
        keyed = self._seeded
        if self._how == "process":
            return self._in_processes(keyed, self._tasks(run, self.seed if self.seed is not None else run.seed))
        # torch draws one base seed for each iterator, before its sampler draws anything; so do we.
        base = int(torch.empty((), dtype=torch.int64).random_(generator=self.generator).item())
        seed = self.seed if self.seed is not None else run.seed
        tasks = self._tasks(run, base if seed is None else seed)
        fetch = self._fetch(keyed)
        batches: Iterator[Any]
        if self._how == "inline":
            batches = InlineBatches(tasks, fetch)
        else:
            if fetch.seed_globals:
                fetch.seed_globals = False
                warn_threads(self.dataset)
            depth = max(1, self.num_workers * (self.prefetch_factor or 2))
            batches = ThreadBatches(
                tasks, fetch, self._threads(), depth=depth, timeout=self.timeout, in_order=self.in_order
            )
        return pinned(batches, self.pin_memory_device) if self.pin_memory else batches

    def _tasks(self, run: BatchPass, seed: int | None) -> Iterator[Task]:
        samples = self._samples
        rank = getattr(samples, "rank", None)
        if not isinstance(rank, int):
            rank = distributed.current().rank
        place = getattr(samples, "place", None) if hasattr(samples, "start_pass") else None
        return plan(run, seed or 0, rank=rank, place=place, elastic=not self._shuffles_a_share)

    @property
    def _samples(self) -> Any:
        """The map-style data set; that inside an iterable one of ours."""
        samples: Any = (
            getattr(self.dataset, "samples", None) if isinstance(self.dataset, IterableDataset) else self.dataset
        )
        return samples

    @property
    def _shuffles_a_share(self) -> bool:
        """Whether the user's own sampler stands over a data set that keeps a place itself."""
        if not hasattr(self.dataset, "start_pass") or isinstance(self.dataset, IterableDataset):
            return False
        sampler = getattr(self.batch_sampler, "sampler", self.sampler)
        return not (isinstance(sampler, SequentialSampler) and sampler.delegates)

    def _fetch(self, keyed: bool) -> Fetch:
        dataset = self._samples
        seed_globals = keyed and not getattr(dataset, "pure", False)
        return Fetch(dataset, self.collate_fn, batched=self._auto_collation, seed_globals=seed_globals)

    def _threads(self) -> ThreadPool:
        if self._pool is not None and self._pool.pid == os.getpid():
            return self._pool
        pool = ThreadPool(self.num_workers, self.worker_init_fn)
        if self.persistent_workers:
            self._pool = pool
        return pool  # otherwise it ends with the iterator that holds it

    def _in_processes(self, keyed: bool, tasks: Iterator[Task]) -> Iterator[Any]:
        if self._workers is None or self._workers.keyed != keyed or not self.persistent_workers:
            options = {name: getattr(self, name) for name in _WORKER_OPTIONS}
            self._workers = Workers(self._fetch(keyed), keyed=keyed, options=options)
        return self._workers.batches(tasks)

    def _stream(self) -> Iterator[T_co]:
        """A foreign iterable data set: torch batches it, in one thread of ours if threads were asked for."""
        self._progress = progress = Progress(None, self._skip)
        batches = skip_batches(self._torch_batches(), self._skip)
        self._skip = 0
        return Delivery(batches, progress, self._finished)

    def _torch_batches(self) -> Iterator[Any]:
        if self._how != "thread":
            return super().__iter__()
        inline: TorchDataLoader[Any] = TorchDataLoader(
            self.dataset,
            self.batch_size,
            collate_fn=self.collate_fn,
            pin_memory=self.pin_memory,
            drop_last=self.drop_last,
            generator=self.generator,
        )
        depth = self.num_workers * (self.prefetch_factor or 2)
        return read_ahead(iter(inline), ThreadPool(1, self.worker_init_fn), depth=depth, timeout=self.timeout)

    def close(self) -> None:
        """End the threads; workers of the process executor end with their iterator. Idempotent."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        self._workers = None

    def __enter__(self) -> DataLoader[T_co]:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _length(run: BatchPass) -> int:
    """Batches of a pass; 0 where nobody knows."""
    try:
        return len(run)
    except TypeError:
        return 0
