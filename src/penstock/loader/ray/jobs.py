"""What `RayBatches` works with: a batch in the making, how batches are dealt, what is kept from pass to pass."""

from __future__ import annotations

import statistics
from collections import deque
from typing import Any, NamedTuple

from penstock.loader.ray.actors import Actors
from penstock.loader.ray.budget import Budget
from penstock.loader.ray.elastic import Elastic
from penstock.loader.ray.landing import Landing
from penstock.loader.ray.member import Call
from penstock.loader.work import Task
from penstock.manifest import Manifest

__all__ = ["Batch", "Desk", "Rules"]

_KNOWN = 3
"""Batches that have to be made before it is known how long one takes."""


_LITTLE = 10e-3
"""Seconds below which a batch is made quickly: to hand one over takes three milliseconds of processors' time."""

_TOGETHER = 30e-3
"""Seconds of work that are handed over together then."""


class Rules(NamedTuple):
    """How batches are dealt.

    Attributes:
        turns: batch k by worker k mod n: streams, and objects with a state of their own.
        stream: whether workers hold iterators.
        in_order: False delivers what is ready.
        timeout: seconds to wait for a batch; 0 for ever.
        prefetch: batches in flight for each worker.
        light: the same for batches that are made quickly.
    """

    turns: bool
    stream: bool
    in_order: bool
    timeout: float
    prefetch: int
    light: int


class Desk:
    """What a loader keeps from pass to pass."""

    def __init__(self, actors: Actors, budget: Budget, elastic: Elastic) -> None:
        self.actors = actors
        self.manifests: dict[str, Manifest] = {}  # of the data set, by key
        self.budget = budget
        self.elastic = elastic
        self.landing = Landing()
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


class Batch:
    """A batch in the making.

    Attributes:
        number: in its pass.
        packed: the task, pickled.
        wanted: rows that workers lack, by the key of their manifest.
        collate: False for the samples of a task as they are.
        calls: that are under way for it.
        answer: kind, payload, work and buffers, once it is ``done``.
        hedged: whether it was made once more.
        lost: nodes of the workers that were lost over it.
        why: what the last of them came to.
        worker: that made it, or was asked last.
    """

    __slots__ = (
        "answer",
        "calls",
        "collate",
        "done",
        "hedged",
        "lost",
        "number",
        "packed",
        "task",
        "wanted",
        "why",
        "worker",
    )

    def __init__(self, number: int, task: Task, packed: bytes = b"", *, collate: bool = True) -> None:
        self.number = number
        self.task = task
        self.packed = packed
        self.collate = collate
        self.calls: list[Call] = []
        self.answer: tuple[str, Any, Any, list[Any]] = ("", None, None, [])
        self.done = False
        self.hedged = False
        self.lost: list[str] = []
        self.why: Exception | None = None
        self.wanted: dict[str, set[int]] = {}
        self.worker = 0

    def finish(self, kind: str, payload: Any = None, work: Any = None, arrays: list[Any] | None = None) -> None:
        """This is what became of it."""
        self.answer = (kind, payload, work, arrays or [])
        self.done = True

    def take(self) -> tuple[str, Any, Any, list[Any]]:
        """The answer, which is not kept: buffers hold on to the object store."""
        answer, self.answer = self.answer, ("", None, None, [])
        return answer
