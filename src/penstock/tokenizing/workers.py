"""Who tokenizes: this process, processes of this machine, or a Ray cluster. Results come in the order of the rows."""

from __future__ import annotations

import os
import pickle
import secrets
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any

from penstock.errors import ConfigError, WorkerError
from penstock.processes import process_pool
from penstock.tokenizing.task import Encoded, Work
from penstock.tokens.tokenizer import NO_THREADS

__all__ = ["Run", "check_executor", "start"]

_EXECUTORS = ("process", "ray")

_AHEAD = 3  # tasks for each worker: one that takes long must not have the others wait

Span = tuple[int, int]
Run = Callable[[Iterator[Span]], Iterator[Encoded]]
"""Spans of rows in, their documents out, in the same order; spans are taken when there is room for them."""


def check_executor(executor: str, workers: int | None, address: str | None) -> None:
    """Refuse what makes no sense of `start`'s arguments.

    Raises:
        ConfigError: an unknown executor, no workers, an address that nobody uses.
    """
    if executor not in _EXECUTORS:
        raise ConfigError(f"unknown executor={executor!r}: use one of {', '.join(map(repr, _EXECUTORS))}")
    if workers is not None and workers < 1:
        raise ConfigError("workers must be positive")
    if address is not None and executor != "ray":
        raise ConfigError("address= is that of a Ray cluster, for executor='ray'")


@contextmanager
def start(work: Work, executor: str, workers: int | None, address: str | None) -> Iterator[tuple[Run, int]]:
    """Give what runs tasks, and how many workers it has, until the block ends.

    Raises:
        ConfigError: Ray is missing.
        ClusterError: no cluster.
        WorkerError: (while it runs) a worker was killed.
    """
    if executor == "ray":
        yield _on_ray(work, workers, address)
        return
    if workers is None:
        from penstock.cores import cores

        workers = cores()
    if workers == 1:
        yield (lambda spans: (work.encode(*span) for span in spans)), 1
        return
    with process_pool(workers, _begin, work) as pool:
        yield (lambda spans: _processes(pool, spans, workers)), workers


_work: Work | None = None


def _begin(work: Work) -> None:
    """Keep what a worker process is to do. It does nothing else, so threads may be turned off in it."""
    global _work
    _work = work
    os.environ[NO_THREADS] = "false"


def _encode(span: Span) -> Encoded:
    assert _work is not None
    return _work.encode(*span)


def _processes(pool: Any, spans: Iterator[Span], workers: int) -> Iterator[Encoded]:
    try:
        yield from _in_order(spans, lambda span: pool.submit(_encode, span), lambda task: task.result(), workers)
    except BrokenProcessPool as error:
        raise WorkerError("a worker was killed (out of memory?); tokenize again to go on") from error


def _in_order(
    spans: Iterator[Span], submit: Callable[[Span], Any], result: Callable[[Any], Encoded], workers: int
) -> Iterator[Encoded]:
    """Yield results in the order of their spans, a bounded number of them ahead."""
    waiting: deque[Any] = deque()
    for span in spans:
        waiting.append(submit(span))
        if len(waiting) >= _AHEAD * workers:
            yield result(waiting.popleft())
    while waiting:
        yield result(waiting.popleft())


# On a cluster a task may run in any process there: each keeps what it was told to do last.
_told: dict[str, Work] = {}


def _encode_there(key: str, pickled: bytes, span: Span) -> Encoded:
    if key not in _told:
        _told.clear()
        _told[key] = pickle.loads(pickled)
    return _told[key].encode(*span)


def _on_ray(work: Work, workers: int | None, address: str | None) -> tuple[Run, int]:
    from penstock.loader.executors.ray.cluster import attach, load_ray, resources

    ray = load_ray()
    attach(address)
    # Unpickled by Ray, it would be opened again for each task.
    pickled = ray.put(pickle.dumps(work))
    key = secrets.token_hex(8)
    task = ray.remote(num_cpus=1)(_encode_there)
    count = workers or max(1, int(resources().get("CPU", 1)))

    def take(reference: Any) -> Encoded:
        try:
            found: Encoded = ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, Exception) else error from None
        except ray.exceptions.RayError as error:
            raise WorkerError(f"a task on the Ray cluster was lost: {error}. Tokenize again to go on") from error
        return found

    def run(spans: Iterator[Span]) -> Iterator[Encoded]:
        return _in_order(spans, lambda span: task.remote(key, pickled, span), take, count)

    return run, count
