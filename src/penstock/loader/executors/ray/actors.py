"""The workers of one loader in the cluster, as the program sees them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import ray

from penstock.loader.executors.ray.options import RayOptions
from penstock.loader.messages import BatchRequest

__all__ = ["Call", "RayWorker", "resources_of"]


@dataclass(eq=False)
class RayWorker:
    """A worker.

    Attributes:
        number: its number.
        actor: Ray's handle.
        node: the name of its node; None until it has started.
        dead: whether it was lost.
        setup: number of the dataset that it has; 0 for none.
        calls: its unanswered calls, oldest first.
        started: when its start was requested.
        last: when it answered last.
    """

    number: int
    actor: Any
    node: str | None = None
    dead: bool = False
    setup: int = 0
    calls: list[Call] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    last: float = 0.0

    @property
    def ready(self) -> bool:
        """Whether it can make batches."""
        return self.node is not None and not self.dead

    @property
    def owed(self) -> int:
        """The number of requested batches."""
        return sum(len(call.requests) for call in self.calls)


@dataclass(eq=False)
class Call:
    """A request for batches, whose answers have the same order.

    Attributes:
        requests: the batches; none if it starts a run.
        number: the number of the worker that they were submitted to.
        worker: the worker that makes them: another one, while that one has not started.
        ref: Ray's reference to the answers.
        sent: when it was sent.
    """

    requests: list[BatchRequest]
    number: int
    worker: RayWorker
    ref: Any
    sent: float = field(default_factory=time.monotonic)


def resources_of(options: RayOptions) -> str:
    """Return which resources workers wait for, in words."""
    actors = options.of_actors()
    actors.pop("runtime_env", None)
    wanted = ", ".join(f"{name}={value!r}" for name, value in actors.items())
    free = ", ".join(f"{k} {v:g}" for k, v in ray.available_resources().items() if ":" not in k)
    return f"each asks for {wanted}, and free in the cluster are {free}"
