"""`Member`: one worker as the consumer sees it: what it was asked for, how fast it is; and what goes there and back."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.loader.executors.ray.cluster import Node
from penstock.plan.stream_plan import EpochStart

__all__ = ["Answer", "Call", "Counts", "Member", "Pass"]


class Pass(NamedTuple):
    """What a worker is told when a pass begins. ``fresh``: with a new copy of the data set."""

    run: int
    epoch: EpochStart
    states: dict[int, Any]
    base_seed: int
    fresh: bool


class Call:
    """Batches that a worker was asked for; their order is that of its answers."""

    __slots__ = ("items", "member", "ref", "sent")

    def __init__(self, ref: Any, items: list[Any], member: Member) -> None:
        self.ref = ref
        self.items = items
        self.member = member
        self.sent = time.monotonic()


_SMOOTH = 0.2  # weight of the last batch


class Answer(NamedTuple):
    """What became of calls: the value of one, or the error that all of them came to."""

    calls: list[Call]
    value: Any
    error: Exception | None
    lost: Member | None


class Member:
    """One worker, as seen by the consumer."""

    def __init__(self, number: int, actor: Any) -> None:
        self.number = number
        self.actor = actor
        self.node: Node | None = None  # once it has said hello
        self.started = time.monotonic()
        self.calls: list[Call] = []  # oldest first
        self.seconds = 0.0  # that a batch takes it, smoothed; 0 until there was one
        self.last = 0.0  # when it answered last
        self.primed = False  # has the data set
        self.far: set[str] = set()  # manifests whose rows have to be sent to it
        self.cpus = 0.0  # that it takes of the cluster

    @property
    def place(self) -> str:
        """Where it is, for people."""
        return "that never started" if self.node is None else self.node.name

    @property
    def owed(self) -> int:
        """Batches that it was asked for."""
        return sum(len(call.items) for call in self.calls)

    def begun(self, call: Call) -> float:
        """When it turned to a call, as far as one can see from here."""
        return max(call.sent, self.last)

    def took(self, seconds: float) -> None:
        """It has made a batch in so many seconds."""
        self.seconds += (seconds - self.seconds) * (_SMOOTH if self.seconds else 1.0)

    def expected(self, typical: float, now: float) -> float:
        """Seconds after which it would have done one more batch. One that has been slow is tried again in time."""
        seconds = self.seconds or typical
        if self.calls:
            first = self.calls[0]
            seconds = max(seconds, (now - self.begun(first)) / len(first.items))
        elif seconds > typical > 0:
            seconds = max(typical, seconds * 0.5 ** ((now - self.last) / (5 * seconds)))
        return (self.owed + 1) * (seconds or 1.0)


@dataclass
class Counts:
    """What came from one node."""

    workers: int = 0
    batches: int = 0
    samples: int = 0
    bytes: int = 0
    seconds: float = 0.0
    lost: int = 0
