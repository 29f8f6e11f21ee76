"""`Probe`: a loader's components for measurements: its batches by any executor, without changing the loader.

    probe = Probe(as_penstock_loader(loader), batches=64)
    for arrival in probe.run("process", 2, probe.requests):   # Arrival: result, times of request and delivery
        ...

Invariant: order, epoch, statistics and workers of the loader stay, and so do the global generators and the generators
of its samplers. Exceptions: a sampler that is an iterator without a state is advanced, and an iterable dataset is
iterated.
"""

from __future__ import annotations

import copy
import itertools
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, SequentialSampler, default_collate, default_convert

from penstock.loader.config import PROCESSES, LoaderConfig
from penstock.loader.dataloader import DataLoader
from penstock.loader.dataloader_iter import Progress
from penstock.loader.make import Fetch, Fetcher, fetcher_of
from penstock.loader.messages import BatchMetrics, BatchRequest, BatchResult
from penstock.loader.user_state import preserved_generators
from penstock.loader.window import Window
from penstock.loader.workers import Workers
from penstock.plan.user_states import has_state
from penstock.samplers.base import PlanSampler
from penstock.samplers.batch import layers
from penstock.samplers.external import ExternalSampler
from penstock.samplers.identity import own_order

__all__ = ["Arrival", "Probe", "as_penstock_loader", "make", "preserved_loader_generators"]

# Base seed of the workers. The measured batches are discarded.
_SEED = 0x70726F6265
# Minimum number of requests, whatever their number of samples.
_LEAST = 256


class Arrival(NamedTuple):
    """A batch as its consumer sees it; times from `time.perf_counter`.

    Attributes:
        result: the batch with its metrics.
        asked: time of the request.
        had: time of the delivery.
        ready: number of finished batches at the request.
    """

    result: BatchResult
    asked: float
    had: float
    ready: int


class Probe:
    """The batches of a loader, made by any executor.

    Args:
        loader: the loader, which does not change.
        batches: maximum number of batches to plan, from where the loader's next iterator starts.
        samples: approximate number of samples to plan, if batches are large.

    Attributes:
        requests: the first batches of the next iterator; empty for a stream.
        stream: whether only the dataset knows the order.
        config: the loader's settings, including the one that "auto" tries now.
        threads: whether several threads may call the dataset: it is declared pure, or already used by threads.
    """

    def __init__(self, loader: DataLoader[Any], *, batches: int, samples: int = 1 << 20) -> None:
        self.loader = loader
        self.config = loader.running_config
        self.stream = loader.consumer.plan is None
        in_threads = self.config.kind == "thread" or self.config.threads > 1
        self.threads = not self.stream and (self.config.pure or in_threads)
        self.requests = [] if self.stream else _requests(loader, batches, samples)

    @property
    def samples(self) -> Any:
        """The map-style dataset, also inside one of our iterable ones."""
        return self.loader.consumer.samples

    @property
    def batch_size(self) -> int:
        """Samples per batch, 1 without batching."""
        sizes = [request.size for request in self.requests]
        return max(sizes) if sizes else self.loader.batch_size or 1

    def fetcher(self, config: LoaderConfig | None = None) -> Fetcher:
        """Return a new fetcher for the loader's batches, by default with the loader's own config."""
        with warnings.catch_warnings():
            # It would warn of global generators in threads, but their draws are discarded here.
            warnings.simplefilter("ignore")
            return fetcher_of(self.loader.consumer, config or self.config)

    def run(self, executor: str, count: int, requests: Iterable[BatchRequest]) -> Generator[Arrival, None, None]:
        """Yield batches of the requests, made by ``count`` workers of an executor ("inline", "process", ...).

        Closing the iterator drops the rest. For a stream the requests are ignored, and the stream starts from its
        beginning.

        Raises:
            Exception: an error of the dataset or of starting workers.
        """
        config = self.config_of(executor, count)
        workers = Workers(config, self.fetcher)
        batches: Window | None = None
        try:
            workers.prepare(_SEED)
            plan = itertools.repeat(BatchRequest([], [])) if self.stream else requests
            # Copies, since a request has the number of its run, and may be used again.
            batches = workers.window(map(copy.copy, plan), None, lambda worker: None, 0)
            while True:
                asked = time.perf_counter()
                try:
                    result = batches.next()
                except StopIteration:
                    return
                if result.error is not None:
                    raise result.error
                arrival = Arrival(result, asked, time.perf_counter(), batches.ready_on_request)
                # Drop the reference, so that the slot is free as soon as the consumer drops its own.
                del result
                yield arrival
                del arrival
        finally:
            if batches is not None:
                batches.close()
            workers.close()

    def config_of(self, executor: str, workers: int) -> LoaderConfig:
        """Return the loader's settings with another executor and number of workers, for one iterator."""
        config = replace(
            self.config,
            executor=executor,
            num_workers=workers,
            threads_per_worker=1,
            persistent_workers=False,
            on_worker_death="raise",
            ray_options=None,
        )
        return config if workers else replace(config, timeout=0, max_bytes_in_flight=None)

    def executors(self) -> list[str]:
        """Return the executors with workers to try here, starting with the one that slows the training least."""
        names = ["auto"] if self.config.releases_gil and PROCESSES else []
        names += ["process"] if PROCESSES else []
        return [*names, *(["thread"] if self.threads or not PROCESSES else [])]


def make(
    fetcher: Fetcher, request: BatchRequest, metrics: BatchMetrics, clock: Callable[[], float]
) -> dict[str, float]:
    """Make a batch in this thread and discard it. Return the seconds of "fetch", including named stages, and "collate".

    ``metrics`` contains the stages.

    Raises:
        StopIteration: the stream has ended.
    """
    if isinstance(fetcher, Fetch) and not fetcher._whole:
        start = clock()
        samples = fetcher(request, metrics, collate=False)
        middle = clock()
        fetcher(request, metrics, samples)
        return {"fetch": middle - start, "collate": clock() - middle}
    start = clock()
    fetcher(request, metrics)
    spent = clock() - start
    collate = min(metrics.collate, spent)
    return {"fetch": spent - collate, "collate": collate}


def as_penstock_loader(loader: TorchDataLoader[Any]) -> DataLoader[Any]:
    """Return a torch loader as a Penstock one; a Penstock loader unchanged.

    Raises:
        ValueError: our loader refuses an argument, such as one of torch's DataPipes.
    """
    if isinstance(loader, DataLoader):
        return loader
    collate = None if loader.collate_fn in (default_collate, default_convert) else loader.collate_fn
    options: dict[str, Any] = {"collate_fn": collate, "generator": loader.generator}
    # torch's loader yields the positions of such a dataset's own order, in their order.
    theirs = loader.batch_size is None and loader.batch_sampler is not None
    own = own_order(loader.dataset) is not None and type(loader.sampler) is SequentialSampler and not theirs
    if own or isinstance(loader.dataset, IterableDataset):
        options.update(batch_size=loader.batch_size, drop_last=loader.drop_last)
    elif loader.batch_sampler is not None:
        options["batch_sampler"] = loader.batch_sampler
    else:
        options.update(batch_size=None, sampler=loader.sampler)
    if loader.num_workers:
        options.update(num_workers=loader.num_workers, prefetch_factor=loader.prefetch_factor, timeout=loader.timeout)
        options.update(executor="process" if PROCESSES else "thread")
        if PROCESSES:
            options["multiprocessing_context"] = loader.multiprocessing_context
    with warnings.catch_warnings():
        # The creator of the original loader has already seen torch's warnings.
        warnings.simplefilter("ignore")
        return DataLoader(loader.dataset, worker_init_fn=loader.worker_init_fn, in_order=loader.in_order, **options)


@contextmanager
def preserved_loader_generators(loader: DataLoader[Any]) -> Iterator[None]:
    """Restore the global generators and those of the loader and its samplers at the end of the block."""
    samplers = [*layers(loader.batch_sampler), *layers(loader.sampler)]
    own = [loader.generator, *(getattr(sampler, "generator", None) for sampler in samplers)]
    states = [(each, each.get_state()) for each in own if isinstance(each, torch.Generator)]
    with ExitStack() as stack:
        stack.enter_context(preserved_generators())
        try:
            yield
        finally:
            for generator, state in states:
                generator.set_state(state)


def _requests(loader: DataLoader[Any], batches: int, samples: int) -> list[BatchRequest]:
    """Return the first batches of the next iterator, without starting it."""
    consumer = loader.consumer
    assert consumer.plan is not None
    # A preview does not change our plans. Asking them for a state could draw a seed.
    moved = [one for one in layers(consumer.plan.source) if has_state(one) and not isinstance(one, PlanSampler)]
    kept = [(one, one.state_dict()) for one in moved]
    left = [(plan, plan.left) for plan in _external(consumer.plan)]
    with preserved_loader_generators(loader):
        progress = Progress(consumer.preview(), _SEED)
        requests = _first(itertools.chain.from_iterable(consumer.requests(progress)), batches, samples)
    for one, state in kept:
        one.load_state_dict(state)
    for plan, point in left:
        plan.left = point
    return requests


def _external(plan: Any) -> Iterator[ExternalSampler]:
    """Yield the plans, from the outermost to the innermost, that read another library's sampler."""
    while plan is not None:
        if isinstance(plan, ExternalSampler):
            yield plan
        plan = getattr(plan, "inner", None)


def _first(requests: Iterator[BatchRequest], batches: int, samples: int) -> list[BatchRequest]:
    """Return the first requests: at most ``batches``, and about ``samples`` samples but at least 256 requests."""
    found: list[BatchRequest] = []
    for request in itertools.islice(requests, batches):
        found.append(request)
        samples -= request.size
        if samples <= 0 and len(found) >= _LEAST:
            break
    return found
