"""`Probe`: what a loader is made of, for those who measure it: its batches by any executor, while the loader stays.

    probe = Probe(as_ours(loader), batches=64)
    for arrival in probe.run("process", 2, probe.requests):   # Arrival: result, when it was asked for and had
        ...

Invariant: order, epoch, statistics and workers of the loader are afterwards what they were, and so are the global
generators and those of its samplers. A sampler that is an iterator, without a state, is drawn from, and an iterable
dataset is iterated.
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import IterableDataset, default_collate, default_convert

from penstock.loader.config import PROCESSES, LoaderConfig
from penstock.loader.dataloader import DataLoader
from penstock.loader.dataloader_iter import Progress, ResultIterator
from penstock.loader.engine import Engine, Run
from penstock.loader.failures import OnError
from penstock.loader.fetch import Fetch, Fetcher, preserved_generators
from penstock.loader.messages import BatchMetrics, BatchRequest, BatchResult
from penstock.plan.user_states import has_state
from penstock.samplers.base import PlanSampler
from penstock.samplers.external import ExternalSampler
from penstock.samplers.shares import layers

__all__ = ["Arrival", "Probe", "as_ours", "kept_generators", "make"]

_SEED = 0x70726F6265  # of the workers; what is measured is thrown away
_LEAST = 256  # requests, however many samples they have


class Arrival(NamedTuple):
    """A batch as its consumer sees it; times by `time.perf_counter`.

    Attributes:
        result: the batch and what it took.
        asked: when it was asked for.
        had: when it came.
        ready: batches that were finished when it was asked for.
    """

    result: BatchResult
    asked: float
    had: float
    ready: int


class Probe:
    """A loader's batches, made again by whatever executor.

    Args:
        loader: stays as it is.
        batches: that are planned from where the loader's next pass begins, of few samples at most.
        samples: that are planned, about, if their batches are large.

    Attributes:
        requests: the first batches of the next pass; empty for a stream.
        stream: whether only the dataset knows the order.
        config: the loader's settings, with what "auto" tries now.
        pure, releases_gil: what the dataset says of itself.
        threads: whether several threads may ask the dataset: it says that it is pure, or has threads already.
    """

    def __init__(self, loader: DataLoader[Any], *, batches: int, samples: int = 1 << 20) -> None:
        self.loader = loader
        self.config = loader.running_config
        self._pipeline = loader.pipeline
        self.stream = self._pipeline.stream
        self.pure, self.releases_gil = self.config.pure, self.config.releases_gil
        in_threads = self.config.kind == "thread" or self.config.threads > 1
        self.threads = not self.stream and (self.pure or in_threads)
        self.requests = [] if self.stream else _requests(loader, batches, samples)

    @property
    def samples(self) -> Any:
        """The dataset; the map-style one inside an iterable one of ours."""
        return self._pipeline.samples

    @property
    def batch_size(self) -> int:
        """Samples of a batch, 1 where batching is off."""
        sizes = [len(request.indices) for request in self.requests]
        return max(sizes) if sizes else self.loader.batch_size or 1

    def fetcher(self, config: LoaderConfig | None = None) -> Fetcher:
        """Return a new one, that makes the loader's batches; by its own config if none is given."""
        config = self.config if config is None else config
        policy = OnError.of(config.on_error)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of global generators in threads: what is drawn is thrown away
            return self._pipeline.fetcher(config, policy if policy.tolerant else None)

    def run(self, executor: str, workers: int, requests: Iterable[BatchRequest]) -> Generator[Arrival, None, None]:
        """Batches of these requests, as an executor makes them ("inline", "thread", "process", "auto"); what is left is
        given up when the iterator is closed. A stream's requests say nothing, and its pass begins anew.

        Raises:
            Exception: whatever the dataset raises, or starting workers does.
        """
        config = self.config_of(executor, workers)
        fetcher, engine = self.fetcher(config), Engine(config)
        batches: ResultIterator | None = None
        try:
            engine.prepare(fetcher, _SEED)
            plan = itertools.repeat(BatchRequest([], [])) if self.stream else iter(requests)
            batches = engine.start(Run(plan, fetcher, None, _SEED, lambda worker: None, 0))
            while True:
                asked = time.perf_counter()
                try:
                    result = batches.next()
                except StopIteration:
                    return
                if result.error is not None:
                    raise result.error
                arrival = Arrival(result, asked, time.perf_counter(), batches.ready_when_asked)
                del result  # its slot is free when the consumer lets go of it
                yield arrival
                del arrival
        finally:
            if batches is not None:
                batches.close()
            engine.close()

    def config_of(self, executor: str, workers: int) -> LoaderConfig:
        """Return the loader's settings with another executor and number of workers, for one pass."""
        config = replace(
            self.config,
            executor=executor,
            num_workers=workers,
            threads_per_worker=1,
            persistent_workers=False,
            on_worker_death="raise",
            ray_options=None,
        )
        if config.kind != "process":
            config = replace(config, dispatch="auto")
        return config if workers else replace(config, timeout=0, max_bytes_in_flight=None)

    def executors(self) -> list[str]:
        """Those with workers that can be tried here, the one that leaves most to the training first."""
        names = ["auto"] if self.releases_gil and PROCESSES else []
        names += ["process"] if PROCESSES else []
        return [*names, *(["thread"] if self.threads or not PROCESSES else [])]


def make(
    fetcher: Fetcher, request: BatchRequest, metrics: BatchMetrics, clock: Callable[[], float]
) -> dict[str, float]:
    """Make a batch in this thread, throw it away, and tell by a clock what the dataset ("fetch", its named stages
    included) and "collate" took. The stages are in the work.

    Raises:
        StopIteration: the stream has ended.
    """
    if isinstance(fetcher, Fetch) and not fetcher._whole:
        start = clock()
        samples = fetcher.samples(request, metrics)
        middle = clock()
        fetcher.collate(samples, request, metrics)
        return {"fetch": middle - start, "collate": clock() - middle}
    start = clock()
    fetcher(request, metrics)
    spent = clock() - start
    collate = min(metrics.collate, spent)
    return {"fetch": spent - collate, "collate": collate}


def as_ours(loader: TorchDataLoader[Any]) -> DataLoader[Any]:
    """The same loader as one of ours; ours as it is.

    Raises:
        ValueError: what our loader refuses, such as one of torch's DataPipes.
    """
    if isinstance(loader, DataLoader):
        return loader
    collate = None if loader.collate_fn in (default_collate, default_convert) else loader.collate_fn
    options: dict[str, Any] = {"collate_fn": collate, "generator": loader.generator}
    if isinstance(loader.dataset, IterableDataset):
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
        warnings.simplefilter("ignore")  # whoever made the other one has had torch's warnings
        return DataLoader(loader.dataset, worker_init_fn=loader.worker_init_fn, in_order=loader.in_order, **options)


@contextmanager
def kept_generators(loader: DataLoader[Any]) -> Iterator[None]:
    """The global generators and those of the loader and its samplers are afterwards what they were."""
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
    """The batches that the next pass begins with. The pass is looked at and never begun."""
    position = loader.pipeline.position
    assert position.plan is not None
    # Ours are plans, which a preview does not move. To ask them for a state could draw a seed.
    moved = [one for one in layers(position.plan.source) if has_state(one) and not isinstance(one, PlanSampler)]
    kept = [(one, one.state_dict()) for one in moved]
    left = [(plan, plan.left) for plan in _external(position.plan)]
    with kept_generators(loader):
        requests = _first(position.requests(Progress(position.preview(), _SEED)), batches, samples)
    for one, state in kept:
        one.load_state_dict(state)
    for plan, point in left:
        plan.left = point
    return requests


def _external(plan: Any) -> Iterator[ExternalSampler]:
    """Yield the plan, and those inside it, that read a sampler of somebody else's."""
    while plan is not None:
        if isinstance(plan, ExternalSampler):
            yield plan
        plan = getattr(plan, "inner", None)


def _first(requests: Iterator[BatchRequest], batches: int, samples: int) -> list[BatchRequest]:
    """So many requests, or as many as have so many samples, but a few hundred in any case."""
    found: list[BatchRequest] = []
    for request in itertools.islice(requests, batches):
        found.append(request)
        samples -= len(request.indices)
        if samples <= 0 and len(found) >= _LEAST:
            break
    return found
