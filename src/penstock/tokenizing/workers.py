"""Workers that tokenize: this process, processes of this machine, or a Ray cluster. Results are in row order."""

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

_AHEAD = 3  # tasks in flight for each worker, so that a long task does not idle the others

Span = tuple[int, int]
Run = Callable[[Iterator[Span]], Iterator[Encoded]]
"""Maps spans of rows to their documents, in order. Spans are consumed lazily."""


def check_executor(executor: str, workers: int | None, address: str | None) -> None:
    """Check the arguments of `start`.

    Raises:
        ConfigError: an unknown executor, no workers, or an address without Ray.
    """
    if executor not in _EXECUTORS:
        raise ConfigError(f"unknown executor={executor!r}: use one of {', '.join(map(repr, _EXECUTORS))}")
    if workers is not None and workers < 1:
        raise ConfigError("workers must be positive")
    if address is not None and executor != "ray":
        raise ConfigError("address= is the address of a Ray cluster: use it with executor='ray', or leave it out")


@contextmanager
def start(work: Work, executor: str, workers: int | None, address: str | None) -> Iterator[tuple[Run, int]]:
    """Start the workers; yield a function that runs tasks on them, and their number. They stop when the block ends.

    Raises:
        ConfigError: Ray is missing.
        ClusterError: no cluster.
        WorkerError: a worker was killed while tasks ran.
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
    """Store the work in a worker process, and turn off the tokenizer's threads there."""
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
        raise WorkerError("a worker was killed (out of memory?): run the same job again, and it continues") from error


def _in_order(
    spans: Iterator[Span], submit: Callable[[Span], Any], result: Callable[[Any], Encoded], workers: int
) -> Iterator[Encoded]:
    """Yield results in the order of their spans, with a bounded number of tasks in flight."""
    waiting: deque[Any] = deque()
    for span in spans:
        waiting.append(submit(span))
        if len(waiting) >= _AHEAD * workers:
            yield result(waiting.popleft())
    while waiting:
        yield result(waiting.popleft())


# On a cluster a task may run in any process. Each process caches the last work that it received.
_told: dict[str, Work] = {}


def _encode_there(key: str, pickled: bytes, span: Span) -> Encoded:
    if key not in _told:
        _told.clear()
        _told[key] = pickle.loads(pickled)
    return _told[key].encode(*span)


def _on_ray(work: Work, workers: int | None, address: str | None) -> tuple[Run, int]:
    from penstock.loader.executors.ray.cluster import attach, ray

    attach(address)
    # Ray would unpickle the work, and so open the source, for each task.
    pickled = ray.put(pickle.dumps(work))
    key = secrets.token_hex(8)
    task = ray.remote(num_cpus=1)(_encode_there)
    count = workers or max(1, int(ray.cluster_resources().get("CPU", 1)))

    def take(reference: Any) -> Encoded:
        try:
            found: Encoded = ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, Exception) else error from None
        except ray.exceptions.RayError as error:
            raise WorkerError(
                f"a task on the Ray cluster was lost: {error}. Run the same job again, and it continues"
            ) from error
        return found

    def run(spans: Iterator[Span]) -> Iterator[Encoded]:
        return _in_order(spans, lambda span: task.remote(key, pickled, span), take, count)

    return run, count
