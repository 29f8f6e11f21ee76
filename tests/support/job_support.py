"""Jobs that are run and written down: which rows each rank had in each step, while ranks and batch sizes change."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from entries_support import opened

from penstock import DataLoader

__all__ = ["Job", "Leg", "Make", "flat", "recorded", "rows_of"]

Make = Callable[[int, int, int], DataLoader[Any]]
"""Makes the loader of a rank: of (rank, ranks, batch size)."""


class Leg(NamedTuple):
    """A run of a job, from a state to the next one."""

    ranks: int
    batch_size: int
    steps: int


class Job(NamedTuple):
    """What a job did.

    Attributes:
        steps: the rows of each rank, by step.
        epochs: of each step.
        state: of rank 0, after the last step.
    """

    steps: list[list[list[int]]]
    epochs: list[int]
    state: dict[str, Any]

    @property
    def entries(self) -> dict[str, Any]:
        """The entries of the state."""
        return opened(self.state)

    def times(self, row: int, until: int) -> int:
        """Return how often a row was had before a step."""
        return sum(ranks.count(row) for step in self.steps[:until] for ranks in step)


def rows_of(batch: Any) -> list[int]:
    """Return the rows of a batch: of a manifest's records, or of pairs that begin with the row."""
    rows: list[int] = (batch[2] if len(batch) == 3 else batch[0]).tolist()
    return rows


def flat(lists: Iterable[list[int]]) -> list[int]:
    """Return lists one after the other."""
    return [one for some in lists for one in some]


def recorded(make: Make, legs: Iterable[Leg], state: Any = None) -> Job:
    """Run a job, leg after leg, each from the state of the one before."""
    steps: list[list[list[int]]] = []
    epochs = []
    for leg in legs:
        loaders = [make(rank, leg.ranks, leg.batch_size) for rank in range(leg.ranks)]
        for loader in loaders if state is not None else ():
            loader.load_state_dict(json.loads(json.dumps(state)))
        iterators = [iter(loader) for loader in loaders]
        for _ in range(leg.steps):
            while (first := next(iterators[0], None)) is None:
                for iterator in iterators[1:]:
                    assert next(iterator, None) is None
                iterators = [iter(loader) for loader in loaders]
            others = [next(iterator, None) for iterator in iterators[1:]]
            steps.append([[] if batch is None else rows_of(batch) for batch in [first, *others]])
            epochs.append(loaders[0].epoch)
        state = loaders[0].state_dict()
    return Job(steps, epochs, state)
