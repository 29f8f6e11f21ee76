"""Measure the pipeline alone: in one thread, stage by stage, first on new samples, then again on the same ones.

Every other batch is measured in processor time instead of wall time. This shows what share of each stage is waiting,
and no batch has the cost of two clocks.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch

from penstock.datasets.images import ImageDataset
from penstock.datasets.source_dataset import SourceDataset
from penstock.loader.make import Fetcher
from penstock.loader.messages import BatchMetrics, BatchRequest
from penstock.manifest import Manifest
from penstock.stages import by_clock
from penstock.storage import is_remote
from penstock.tools.profiling.probe import Probe, make

__all__ = ["Account", "account", "drop_from_page_cache", "one_thread"]

_LITTLE = 0.02  # below this share of the total time, clocks are too coarse for a stage


class Account:
    """Seconds by stage, in wall time and in processor time, with the numbers of samples."""

    def __init__(self) -> None:
        self.wall: dict[str, float] = {}
        self.cpu: dict[str, float] = {}
        self.wall_samples = self.cpu_samples = self.batches = 0

    @property
    def samples(self) -> int:
        """Number of samples measured with either clock."""
        return self.wall_samples + self.cpu_samples

    def add(self, spent: dict[str, float], samples: int, *, cpu: bool) -> None:
        """Add the seconds of a batch."""
        seconds = self.cpu if cpu else self.wall
        for name, value in spent.items():
            seconds[name] = seconds.get(name, 0.0) + value
        self.batches += 1
        if cpu:
            self.cpu_samples += samples
        else:
            self.wall_samples += samples

    def each(self, name: str) -> float:
        """Return the seconds of a stage per sample."""
        return self.wall.get(name, 0.0) / self.wall_samples if self.wall_samples else 0.0

    def waits(self, name: str) -> float:
        """Return the share of a stage's time in which it waited instead of computing; 0 for a very short stage."""
        if not self.cpu_samples or self.wall.get(name, 0.0) <= _LITTLE * sum(self.wall.values()):
            return 0.0
        return min(1.0, max(0.0, 1 - self.cpu.get(name, 0.0) / self.cpu_samples / self.each(name)))

    @property
    def waiting(self) -> float:
        """Share of waiting in the time of all stages."""
        total = sum(self.wall.values())
        return sum(seconds * self.waits(name) for name, seconds in self.wall.items()) / total if total else 0.0


def account(
    fetcher: Fetcher,
    requests: Iterable[BatchRequest],
    seconds: float,
    *,
    done: Callable[[float], object] = lambda seconds: None,
) -> Account:
    """Build batches until requests or time run out; at least one with each clock, if there are two requests.

    Args:
        fetcher: makes the batches; for a stream it restarts, also when the stream ends early.
        requests: the batches to build; endless for a stream.
        seconds: time limit; a batch in progress is finished.
        done: called with the elapsed seconds.
    """
    result = Account()
    fetcher.begin(None)
    start = time.perf_counter()
    for number, request in enumerate(requests):
        passed = time.perf_counter() - start
        done(min(passed, seconds))
        if passed >= seconds and result.cpu_samples:
            break
        cpu = number % 2 == 1
        clock = time.thread_time if cpu else time.perf_counter
        metrics = BatchMetrics()
        try:
            with by_clock(clock):
                spent = make(fetcher, request, metrics, clock)
        except StopIteration:
            break
        rest = spent.pop("fetch") - sum(metrics.stages.values())
        named = {**metrics.stages, "fetch": max(0.0, rest) + metrics.stages.get("fetch", 0.0), **spent}
        result.add(named, metrics.samples, cpu=cpu)
    done(seconds)
    return result


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch and OpenCV to the calling thread, as in workers, until the block ends."""
    cv2: Any = sys.modules.get("cv2")
    threads = torch.get_num_threads()
    others = cv2.getNumThreads() if cv2 is not None else 0
    torch.set_num_threads(1)
    if cv2 is not None:
        cv2.setNumThreads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if cv2 is not None:
            cv2.setNumThreads(others)


def drop_from_page_cache(probe: Probe, requests: Iterable[BatchRequest]) -> int:
    """Drop the files of these samples from the page cache, so that storage is measured; return the number of files.

    Only manifests know the names of their files. For other datasets, nothing is dropped.
    """
    dropped = 0
    if not hasattr(os, "posix_fadvise"):
        return dropped
    for path in _files(probe.samples, requests):
        with suppress(OSError):  # loading reports a missing file
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                dropped += 1
            finally:
                os.close(descriptor)
    return dropped


def _files(samples: Any, requests: Iterable[BatchRequest]) -> Iterator[str]:
    source = samples.source if isinstance(samples, ImageDataset) else samples
    manifest = source.source if isinstance(source, SourceDataset) else source
    if not isinstance(manifest, Manifest):  # shards, a server, or a dataset of the user
        return
    for request in requests:
        request.unpack()
        at = () if request.place is None else (request.place,)
        for record in source.records(np.asarray(request.indices), *at):
            if not is_remote(record.path):
                yield record.path
