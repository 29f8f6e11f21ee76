"""What `RayExecutor` works with: a batch in the making, and what a loader keeps from pass to pass."""

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
"""Batches that have to be made before it is known how long one takes."""


_ALONE = 2
"""How many workers may be lost over a sample by itself."""

_LITTLE = 10e-3
"""Seconds below which a batch is made quickly: to hand one over takes three milliseconds of processors' time."""

_TOGETHER = 30e-3
"""Seconds of work that are handed over together then."""


class RayRunState:
    """What a loader keeps from pass to pass."""

    def __init__(self, actors: Actors, budget: Budget, elastic: Elastic) -> None:
        self.actors = actors
        self.manifests: dict[str, Manifest] = {}  # of the data set, by key
        self.budget = budget
        self.elastic = elastic
        self.receive_buffer = ReceiveBuffer()
        self.hedged = 0  # batches that were made once more
        self._times: deque[float] = deque(maxlen=64)

    def took(self, seconds: float) -> None:
        """A batch took its worker so long."""
        self._times.append(seconds)

    @property
    def typical(self) -> float:
        """Seconds that a batch takes; 0 if that is not known yet."""
        return statistics.median(self._times) if len(self._times) >= _KNOWN else 0.0

    def group(self, most: int) -> int:
        """How many batches are asked for together: one, unless handing over costs more than making."""
        typical = self.typical
        return max(1, min(most, int(_TOGETHER / typical))) if 0 < typical < _LITTLE else 1


class RayBatch(PendingBatch):
    """A batch in the making.

    Attributes:
        packed: the request, pickled.
        collate: False for the samples of a request as they are.
        finished: whether the answer is there.
        calls: that are under way for it.
        hedged: whether it was made once more.
        lost: nodes of the workers that were lost over it.
        why: what the last of them came to.
        wanted: rows that workers lack, by the key of their manifest.
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
        """Note what became of it."""
        self._answer = (kind, payload, metrics, arrays or [])
        self.finished = True

    def take(self) -> tuple[str, Any, Any, list[Any]]:
        """Return kind, payload, metrics and buffers of the answer.

        It is not kept: buffers hold on to the object store.
        """
        answer, self._answer = self._answer, ("", None, None, [])
        return answer

    def sample(self) -> Any:
        """Return the only sample of a batch that was not collated.

        Raises:
            Exception: what became of it instead.
        """
        kind, payload, _, arrays = self.take()
        if kind == "raise":
            raise payload
        if kind == "error":
            raise rebuild(payload)
        return unpack(payload[0], [array.copy() for array in arrays])[0]

    def is_hopeless(self) -> bool:
        """Return whether enough workers were lost over a sample by itself."""
        return len(self.lost) >= _ALONE

    def despair(self) -> WorkerError:
        """Return the error of a sample over which workers were lost."""
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
