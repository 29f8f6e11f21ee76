"""`Member`: a worker as seen by the consumer: its calls and its speed; and the messages to and from it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.loader.executors.ray.cluster import Node
from penstock.plan.stream_plan import EpochStart

__all__ = ["Answer", "Call", "Counts", "Member", "Pass"]


class Pass(NamedTuple):
    """The message that starts an epoch iterator in a worker. ``fresh``: with a new copy of the dataset."""

    run: int
    epoch: EpochStart
    states: dict[int, Any]
    base_seed: int
    fresh: bool


class Call:
    """A request for batches, whose answers have the same order."""

    __slots__ = ("items", "member", "ref", "sent")

    def __init__(self, ref: Any, items: list[Any], member: Member) -> None:
        self.ref = ref
        self.items = items
        self.member = member
        self.sent = time.monotonic()


_SMOOTH = 0.2  # weight of the latest batch in the mean


class Answer(NamedTuple):
    """The result of calls: the value of one, or the error of all of them."""

    calls: list[Call]
    value: Any
    error: Exception | None
    lost: Member | None


class Member:
    """A worker as seen by the consumer."""

    def __init__(self, number: int, actor: Any) -> None:
        self.number = number
        self.actor = actor
        self.node: Node | None = None  # set by its hello
        self.started = time.monotonic()
        self.calls: list[Call] = []  # oldest first
        self.seconds = 0.0  # smoothed time per batch; 0 before the first
        self.last = 0.0  # time of its last answer
        self.primed = False  # whether it has the dataset
        self.far: set[str] = set()  # manifests whose rows must be sent to it
        self.cpus = 0.0  # CPUs that it reserves in the cluster

    @property
    def place(self) -> str:
        """Its location, for messages."""
        return "that never started" if self.node is None else self.node.name

    @property
    def owed(self) -> int:
        """The number of requested batches."""
        return sum(len(call.items) for call in self.calls)

    def begun(self, call: Call) -> float:
        """Return when it started a call, as far as known here."""
        return max(call.sent, self.last)

    def took(self, seconds: float) -> None:
        """Record the time of a batch."""
        self.seconds += (seconds - self.seconds) * (_SMOOTH if self.seconds else 1.0)

    def expected(self, typical: float, now: float) -> float:
        """Return the expected seconds until it has made one more batch. A slow worker is tried again after a while."""
        seconds = self.seconds or typical
        if self.calls:
            first = self.calls[0]
            seconds = max(seconds, (now - self.begun(first)) / len(first.items))
        elif seconds > typical > 0:
            seconds = max(typical, seconds * 0.5 ** ((now - self.last) / (5 * seconds)))
        return (self.owed + 1) * (seconds or 1.0)


@dataclass
class Counts:
    """The counts of one node."""

    workers: int = 0
    batches: int = 0
    samples: int = 0
    bytes: int = 0
    seconds: float = 0.0
    lost: int = 0
