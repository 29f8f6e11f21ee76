"""Workers that tokenize: this process, processes of this machine, or a Ray cluster. Results are in row order."""

from __future__ import annotations

import os
import pickle
import secrets
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.cores import cores
from penstock.datasets.file_rows import file_rows, row_name
from penstock.datasets.rows import load_rows
from penstock.errors import DataFileError, WorkerError
from penstock.plan.source import Source
from penstock.processes import process_pool
from penstock.tokens.tokenizer import NO_THREADS, TextTokenizer, texts_of

__all__ = ["Run", "Work", "start"]

_AHEAD = 3  # tasks in flight for each worker, so that a long task does not idle the others

Span = tuple[int, int]


class Encoded(NamedTuple):
    """Documents: their concatenated tokens, the number of tokens in each, and the total number of characters."""

    tokens: npt.NDArray[Any]
    lengths: npt.NDArray[np.int64]
    characters: int


class Work:
    """Tokenizes rows of a `Source` or a map-style dataset; picklable if that is."""

    def __init__(self, source: Any, column: str, tokenizer: TextTokenizer, dtype: str) -> None:
        self._source, self._column, self._tokenizer = source, column, tokenizer
        self._dtype = np.dtype(dtype).newbyteorder("<")

    def texts(self, rows: Sequence[int]) -> list[str]:
        """Return the texts of these rows."""
        if isinstance(self._source, Source):
            samples = self._source.records(np.asarray(rows))
        else:
            samples = load_rows(self._source, rows, None)
        return texts_of(samples, self._column, lambda place: self._name(rows[place]))

    def _name(self, row: int) -> str:
        """Return file and row of a row before filters, for messages."""
        return row_name(self._source, int(file_rows(self._source, np.array([row]))[0]))

    def encode(self, start: int, stop: int) -> Encoded:
        """Return the tokens of rows ``start`` to ``stop - 1``. Errors name file and row."""
        texts = self.texts(range(start, stop))
        # There is a worker for each core already, so the tokenizer starts no threads.
        documents = self._tokenizer.encode(texts, threads=False, name=lambda place: self._name(start + place))
        lengths = np.array([len(document) for document in documents], np.int64)
        tokens = np.concatenate([np.empty(0, np.int64), *documents])
        limits = np.iinfo(self._dtype)
        if len(tokens) and not limits.min <= tokens.min() <= tokens.max() <= limits.max:
            k = int(((tokens < limits.min) | (tokens > limits.max)).argmax())
            name = self._name(start + int(np.cumsum(lengths).searchsorted(k, "right")))
            raise DataFileError(
                f"{name} has the token {tokens[k]}, which {self._dtype} cannot hold: use a larger dtype="
            )
        return Encoded(tokens.astype(self._dtype), lengths, sum(map(len, texts)))


Run = Callable[[Iterator[Span]], Iterator[Encoded]]
"""Maps spans of rows to their documents, in order. Spans are consumed lazily."""


@contextmanager
def start(work: Work, executor: str, workers: int | None, address: str | None) -> Iterator[tuple[Run, int]]:
    """Start the workers; yield a function that runs tasks on them, and their number. They stop when the block ends."""
    if executor == "ray":
        yield _on_ray(work, workers, address)
        return
    count = cores() if workers is None else workers
    if count == 1:
        yield (lambda spans: (work.encode(*span) for span in spans)), 1
        return
    with process_pool(count, _begin, work) as pool:

        def run(spans: Iterator[Span]) -> Iterator[Encoded]:
            try:
                yield from _in_order(spans, lambda span: pool.submit(_encode, span), lambda task: task.result(), count)
            except BrokenProcessPool as error:
                raise WorkerError(
                    "a worker was killed (out of memory?): run the same job again, and it continues"
                ) from error

        yield run, count


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


# The work of this worker process, by a key. On a cluster a task may run in any process, which caches the last work.
_works: dict[str, Work] = {}


def _begin(work: Work) -> None:
    """Store the work in a worker process, and turn off the tokenizer's threads there."""
    _works[""] = work
    os.environ[NO_THREADS] = "false"


def _encode(span: Span) -> Encoded:
    return _works[""].encode(*span)


def _encode_there(key: str, pickled: bytes, span: Span) -> Encoded:
    if key not in _works:
        _works.clear()
        _works[key] = pickle.loads(pickled)
    return _works[key].encode(*span)


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
