"""What to do about workers that are lost, silent or slow.

lost     what it owed is made by others, at most three times; then sample by sample, see `penstock.loader.ray.careful`
silent   for longer than the deadline: as if it were lost, since a network that is cut says nothing
slow     the batch that the consumer waits for takes three times as long as others: made once more, elsewhere
"""

from __future__ import annotations

import time
from collections import deque

from ray.exceptions import RayTaskError

from penstock.errors import WorkerError
from penstock.loader.ray.actors import Actors
from penstock.loader.ray.jobs import Batch, Desk, Rules
from penstock.loader.ray.member import Call, Member

__all__ = ["Faults", "node_of"]

_ATTEMPTS = 3
"""How many workers may be lost over a batch."""

_ALONE = 2
"""How many over a sample by itself."""

_SLOW = 3.0
"""Times as long as others, after which a batch is made once more."""

_SHORTEST = 0.05
"""Seconds below which no batch is called slow."""

_AT_WORK = 2
"""Calls of a worker that it may have begun, see `Worker`."""


class Faults:
    """Of one pass.

    Args:
        desk: the workers, and how long batches take.
        rules: how batches are dealt.

    Attributes:
        again: batches that have to be asked for once more.
    """

    def __init__(self, desk: Desk, rules: Rules) -> None:
        self._desk = desk
        self._actors: Actors = desk.actors
        self._rules = rules
        self.again: deque[Batch] = deque()

    def lost(self, member: Member, calls: list[Call], error: Exception | None) -> None:
        """A worker is gone.

        Raises:
            WorkerError: nobody can go on in its place.
        """
        if self._rules.turns:
            raise self._actors.dead(
                f"worker {member.number} on node {node_of(member)} was lost, and with it what its copy of the data set "
                "was at: an iterable data set, or one with a state of its own, cannot go on without. Resume from the "
                f"last state_dict(). Ray says: {error}"
            )
        for place, call in enumerate(calls):
            batch: Batch
            for batch in call.items:
                batch.calls.remove(call)
                if batch.done:
                    continue
                if place < _AT_WORK:
                    self.make_again(batch, member, error)
                elif not batch.calls:
                    self.again.append(batch)

    def make_again(self, batch: Batch, member: Member, error: Exception | None) -> None:
        """A worker has not made a batch, and is not to be asked again."""
        batch.lost.append(node_of(member))
        batch.why = error
        if batch.calls:
            return  # another one is at it already
        if not batch.collate and len(batch.lost) >= _ALONE:
            batch.finish("raise", _hopeless(batch))
        elif batch.collate and len(batch.lost) >= _ATTEMPTS:
            batch.finish("careful")
        else:
            self.again.append(batch)

    # Silent ones.

    def given_up_at(self) -> float | None:
        """When the next worker is given up."""
        limit = self._actors.options.deadline
        begun = [member.begun(member.calls[0]) for member in self._actors.ready() if member.calls]
        return min(begun) + limit if limit is not None and begun else None

    def give_up(self) -> None:
        """Whoever has been silent for too long is lost."""
        limit, now = self._actors.options.deadline, time.monotonic()
        assert limit is not None
        for member in self._actors.ready():
            if member.calls and now >= member.begun(member.calls[0]) + limit:
                error = WorkerError(f"no answer for {limit:g} s, which is RayOptions(deadline=)")
                self.lost(member, self._actors.replace(member), error)

    # Slow ones.

    def slow_at(self, head: Batch | None) -> float | None:
        """When the batch that the consumer waits for is taking too long; None if nobody else may make it."""
        if head is None or head.done or head.hedged or len(head.calls) != 1 or self._rules.turns:
            return None
        typical = self._desk.typical
        if not typical or not self._actors.options.hedge or len(self._actors.ready()) < 2:
            return None
        call = head.calls[0]
        return call.member.begun(call) + max(_SHORTEST, _SLOW * typical * len(call.items))


def node_of(member: Member) -> str:
    """Where a worker is, for people."""
    return "that never started" if member.node is None else member.node.name


def _hopeless(batch: Batch) -> WorkerError:
    (index,) = batch.task.indices
    if isinstance(batch.why, RayTaskError):
        return WorkerError(
            f"sample {index!r} ends its call by {type(batch.why.cause).__name__}, which is no error of a sample; the "
            f"last time on node {batch.lost[-1]}. Ray says: {batch.why}"
        )
    return WorkerError(
        f"sample {index!r} takes its worker with it: {_ATTEMPTS} were lost over its batch, and then {len(batch.lost)} "
        f"over it alone, the last one on node {batch.lost[-1]}. Ray says: {batch.why}"
    )
