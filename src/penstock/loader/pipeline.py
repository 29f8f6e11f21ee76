"""`Pipeline`: dataset, plan, position and collation of a loader.

    pipeline.consumer.plan    which samples          pipeline.fetcher(config)    makes a batch of them

A loader has one pipeline, and `Workers` that run it with a `LoaderConfig`. Measurements (`Probe`, auto-tuning) run the
same pipeline with other configs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch.utils.data import IterableDataset, Subset, default_collate

from penstock.errors import ConfigError
from penstock.loader.collate import Collate
from penstock.loader.config import LoaderConfig
from penstock.loader.consumer import Consumer
from penstock.loader.make import Fetch, Fetcher
from penstock.loader.stream import StreamFetch
from penstock.loader.user_state import Snapshot, UserStates, take_snapshot
from penstock.plan.reader import Plan
from penstock.plan.stream import ResumableDataset, Stream
from penstock.plan.user_states import has_state
from penstock.samplers.base import EpochBatchSampler
from penstock.samplers.batch import BatchSampler, batch_plan_of
from penstock.samplers.draws import DrawingSampler
from penstock.samplers.external import ExternalSampler
from penstock.samplers.sequential import SequentialSampler
from penstock.sources.batched import StreamDataset

__all__ = ["Pipeline", "declarations", "draws_as_it_is_read", "plan_of_batches"]


class Pipeline:
    """The source of one loader's batches.

    Args:
        dataset: the loader's dataset.
        plan: plan of its batches; None for streams that only the dataset can order.
        sampler: the sampler of single indices, if any.
        config: the loader's settings, with the declarations of dataset and plan.
        batched: whether samples are collated.
    """

    def __init__(
        self, dataset: Any, plan: EpochBatchSampler | None, sampler: Any, config: LoaderConfig, *, batched: bool
    ) -> None:
        self.dataset = dataset
        self.is_split = False
        """Whether a framework distributes finished batches to the ranks."""
        self._batched = batched
        self.samples: Any = dataset.samples if isinstance(dataset, StreamDataset) else dataset
        """The map-style dataset, also inside one of our iterable ones."""
        self._last: list[Stream] = []
        states = self.user_states(config, stream=plan is None)
        layout = {"batch_size": config.batch_size, "drop_last": config.drop_last}
        self.consumer = Consumer(dataset, plan, sampler, config.seed, layout, states)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last": []}

    @property
    def stream(self) -> bool:
        """Whether only the dataset can order its samples."""
        return self.consumer.plan is None

    def user_states(self, config: LoaderConfig, *, stream: bool) -> UserStates:
        """Return the states of users' objects for the workers of a config."""
        shared = config.kind == "inline" or (config.kind == "thread" and not stream)
        initial: Callable[[], Snapshot | None] | None = None
        if not config.forks_workers:
            objects = self.samples, config.collate_fn
            if stream or isinstance(self.samples, ResumableDataset) or any(map(has_state, objects)):
                initial = partial(take_snapshot, self.samples, None, config.collate_fn, first=True)
        elif isinstance(self.samples, ResumableDataset) and self.samples.own_items:
            # Such a dataset counts its epochs in shared memory.
            initial = partial(take_snapshot, self.samples, None, None, first=True)
        return UserStates(0 if shared else config.workers, stream=stream, initial=initial)

    def fetcher(self, config: LoaderConfig) -> Fetcher:
        """Return a fetcher for a config. torch's default collate function is replaced by ours, which has the same
        results.
        """
        consumer, collate_fn = self.consumer, config.collate_fn
        if self._batched and collate_fn is default_collate:
            images = self.dataset
            while isinstance(images, Subset):
                images = images.dataset
            # The dataset's images keep their strides.
            channels_last = bool(getattr(images, "channels_last", False))
            collate_fn = Collate(channels_last=channels_last, arrays=config.output == "numpy")
        assert collate_fn is not None
        if consumer.plan is None:
            return StreamFetch(
                self.dataset,
                collate_fn,
                batch_size=config.batch_size,
                drop_last=config.drop_last,
                generators={"inline": "trainer", "thread": "shared"}.get(config.kind, "worker"),
                draws_base_seed=config.generator is None,
                last=self._last,
            )
        # Any Ray worker may make any batch, even twice, so draws must not depend on the worker.
        seeds = (consumer.seeded or config.kind == "ray") and not config.pure
        if seeds and (config.kind == "thread" or config.threads > 1):
            seeds = False
            warnings.warn(
                f"{type(self.samples).__name__} does not declare itself pure: in threads only penstock.generator() is "
                "repeatable, while all threads share the global generators of Python, NumPy and torch. Draw from "
                "penstock.generator() and set `pure = True` on the dataset, or use executor='process'",
                stacklevel=7,
            )
        return Fetch(
            self.samples,
            collate_fn,
            batched=self._batched,
            seed_globals=seeds,
            keeps_globals=config.kind == "inline",
            on_error=config.policy,
            owns_generators=config.kind == "process" and config.threads == 1 and not seeds,
        )


def plan_of_batches(loader: Any) -> EpochBatchSampler | None:
    """Return the plan of a loader's batches; None for an iterable dataset that only the dataset can order.

    Raises:
        ConfigError: the batch sizes of the loader and of a dataset that makes batches, such as `MPDataset`, differ.
    """
    dataset = loader.dataset
    if isinstance(dataset, StreamDataset):
        size = dataset.batch_size
        if loader.batch_size != size:
            raise ConfigError(
                f"the loader's batch_size is {loader.batch_size} and the dataset's is {size}: pass equal sizes, "
                "because the dataset assigns whole batches to workers"
            )
        return BatchSampler(SequentialSampler(dataset.samples), size, loader.drop_last or dataset.drop_last)
    if isinstance(dataset, IterableDataset):
        return None
    if loader.batch_sampler is None:
        return BatchSampler(loader.sampler, 1, False)
    return batch_plan_of(loader.batch_sampler)


def draws_as_it_is_read(plan: Plan[Any] | None) -> bool:
    """Return whether reading a plan of batches moves a generator that others may draw from.

    A sampler with a generator does, and one of another library may. It must be read ahead exactly as far as torch does.
    """
    while (inner := getattr(plan, "inner", None)) is not None:
        plan = inner
    if isinstance(plan, ExternalSampler):
        return not isinstance(plan.items, Sequence)
    return isinstance(plan, DrawingSampler) and plan.generator is not None and not plan.at_once


def declarations(dataset: Any) -> dict[str, bool]:
    """Return the declarations of a dataset as settings of a loader. A stream never runs in several threads."""
    samples = dataset.samples if isinstance(dataset, StreamDataset) else dataset
    pure = bool(getattr(samples, "pure", False))
    threads = pure and bool(getattr(samples, "releases_gil", False)) and not isinstance(samples, IterableDataset)
    return {"pure": pure, "releases_gil": threads}
