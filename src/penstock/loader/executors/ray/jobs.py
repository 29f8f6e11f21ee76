"""The data of `RayExecutor`: a batch in progress, and the state that a loader keeps between epoch iterators."""

from __future__ import annotations

import statistics
from collections import deque
from typing import Any

from ray.exceptions import RayTaskError

from penstock.errors import WorkerError
from penstock.loader.exceptions import rebuild
from penstock.loader.executors.base import PendingBatch
from penstock.loader.executors.process.pack import unpack
from penstock.loader.executors.ray.actors import Actors
from penstock.loader.executors.ray.budget import Budget
from penstock.loader.executors.ray.elastic import Elastic
from penstock.loader.executors.ray.member import Call
from penstock.loader.executors.ray.receive_buffer import ReceiveBuffer
from penstock.loader.messages import BatchRequest
from penstock.loader.window import ATTEMPTS
from penstock.manifest import Manifest

__all__ = ["RayBatch", "RayRunState"]

_KNOWN = 3
"""Number of batches to measure before the typical time per batch is known."""


_ALONE = 2
"""Number of workers that may be lost making a single sample."""

_LITTLE = 10e-3
"""A batch that takes fewer seconds is quick: sending one takes three milliseconds of CPU time."""

_TOGETHER = 30e-3
"""Seconds of work that are sent together if batches are quick."""


class RayRunState:
    """The state that a loader keeps between epoch iterators."""

    def __init__(self, actors: Actors, budget: Budget, elastic: Elastic) -> None:
        self.actors = actors
        self.manifests: dict[str, Manifest] = {}  # of the dataset, by key
        self.budget = budget
        self.elastic = elastic
        self.receive_buffer = ReceiveBuffer()
        self.hedged = 0  # batches that were made twice
        self._times: deque[float] = deque(maxlen=64)

    def took(self, seconds: float) -> None:
        """Record the time that a worker took for a batch."""
        self._times.append(seconds)

    @property
    def typical(self) -> float:
        """Return the typical seconds per batch; 0 if not known yet."""
        return statistics.median(self._times) if len(self._times) >= _KNOWN else 0.0

    def group(self, most: int) -> int:
        """Return how many batches are requested together: one, unless sending costs more than making them."""
        typical = self.typical
        return max(1, min(most, int(_TOGETHER / typical))) if 0 < typical < _LITTLE else 1


class RayBatch(PendingBatch):
    """A batch in progress.

    Attributes:
        packed: the pickled request.
        collate: False requests uncollated samples.
        finished: whether the answer has arrived.
        calls: the unanswered calls that request it.
        hedged: whether it was also requested from another worker because it was slow.
        lost: nodes of the workers that were lost while making it.
        why: how the last of them was lost.
        wanted: rows that workers lack, by manifest key.
    """

    __slots__ = ("_answer", "calls", "collate", "finished", "hedged", "lost", "packed", "wanted", "why")

    def __init__(self, number: int, request: BatchRequest, packed: bytes = b"", *, collate: bool = True) -> None:
        super().__init__(number, request)
        self.packed = packed
        self.collate = collate
        self.finished = False
        self.calls: list[Call] = []
        self.hedged = False
        self.lost: list[str] = []
        self.why: Exception | None = None
        self.wanted: dict[str, set[int]] = {}
        self._answer: tuple[str, Any, Any, list[Any]] = ("", None, None, [])

    def finish(self, kind: str, payload: Any = None, metrics: Any = None, arrays: list[Any] | None = None) -> None:
        """Record the answer."""
        self._answer = (kind, payload, metrics, arrays or [])
        self.finished = True

    def take(self) -> tuple[str, Any, Any, list[Any]]:
        """Return kind, payload, metrics and buffers of the answer.

        The batch drops them, since the buffers occupy the object store.
        """
        answer, self._answer = self._answer, ("", None, None, [])
        return answer

    def sample(self) -> Any:
        """Return the only sample of a batch that was not collated.

        Raises:
            Exception: the error that the worker returned.
        """
        kind, payload, _, arrays = self.take()
        if kind == "raise":
            raise payload
        if kind == "error":
            raise rebuild(payload)
        return unpack(payload[0], [array.copy() for array in arrays])[0]

    def is_hopeless(self) -> bool:
        """Return whether the limit of workers lost on a single sample is reached."""
        return len(self.lost) >= _ALONE

    def despair(self) -> WorkerError:
        """Return the error for a sample that workers were lost on."""
        (index,) = self.request.indices
        if isinstance(self.why, RayTaskError):
            return WorkerError(
                f"sample {index!r} ends its call by {type(self.why.cause).__name__}, which is no error of a sample; "
                f"the last time on node {self.lost[-1]}. Ray says: {self.why}"
            )
        return WorkerError(
            f"sample {index!r} takes its worker with it: {ATTEMPTS} were lost over its batch, and then "
            f"{len(self.lost)} over it alone, the last one on node {self.lost[-1]}. Ray says: {self.why}"
        )
