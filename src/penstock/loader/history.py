"""`History`: which steps a job had, as far as its loader knows: how they were dealt, and which it passed over.

state     layouts, steps that were passed over     ->  the number of the step that a run begins with
skip=     steps to pass over                       ->  the batches that are left of the run
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from penstock.errors import ConfigError, StateError
from penstock.loader.config import Ranges, merged, ranges_of
from penstock.loader.layouts import Layouts
from penstock.plan.cursor import State, read_int
from penstock.plan.epoch import BatchEpochPlan, RemainingBatches

__all__ = ["History", "new_history", "within"]


@dataclass(frozen=True, kw_only=True)
class History:
    """What a job did until a run begins.

    Attributes:
        skip: steps that the loader passes over.
        layouts: how steps were dealt.
        passed: steps that were passed over, by whatever loader.
        origin: the step that this loader began with; None if it has loaded a state and has not begun.
        first: the step that the run begins with.
        padded: whether there may be steps of padding alone, of which no position says how many were had.
        stood: the step that such a state stood before; None once the loader has begun.
    """

    skip: Ranges = ()
    layouts: Layouts = field(default_factory=Layouts)
    passed: Ranges = ()
    origin: int | None = 0
    first: int = 0
    padded: bool = False
    stood: int | None = None

    def read(self, state: Mapping[str, Any]) -> Self:
        """Return the history that a state holds, of a job that goes on with this loader.

        Raises:
            StateError: it is damaged.
        """
        entries = state.get("skipped", [])
        stood = read_int(state, "step", of="DataLoader") if "step" in state else None
        try:
            passed = ranges_of(entries)
        except ConfigError as error:
            raise StateError(f"the state of this DataLoader is damaged: skipped is {entries!r}") from error
        return replace(self, layouts=Layouts.read(state, self.layouts.parts), passed=passed, origin=None, stood=stood)

    def followed(self, run: BatchEpochPlan) -> Self:
        """Return the history until a run begins.

        Raises:
            ConfigError: there are steps to pass over, and nobody knows which step a batch of the run is.
        """
        dealt = run.dealt
        if dealt is None:
            if self.skip:
                raise ConfigError(f"skip= passes over steps by their numbers, and {type(run).__name__} has none")
            return self
        layouts = self.layouts.followed(dealt, self.stood)
        first = layouts.step_of(dealt)
        origin = first if self.origin is None else min(first, self.origin)
        padded = dealt.partition.padded >= dealt.partition.world_size
        return replace(self, layouts=layouts, first=first, origin=origin, padded=padded, stood=None)

    def left(self, run: BatchEpochPlan, skipped: int = 0) -> BatchEpochPlan:
        """Return what is left of a run, whose first step this knows, without the first ``skipped`` of it."""
        passed: Ranges = ()
        if self.skip:
            first = self.first
            passed = tuple((begin - first, end - first) for begin, end in within(self.skip, first, first + len(run)))
        if skipped:
            passed = merged([(0, RemainingBatches(run, passed).at(skipped)), *passed])
        return RemainingBatches(run, passed) if passed else run

    def passed_before(self, step: int) -> Ranges:
        """Return the steps before one that were passed over."""
        begin = step if self.origin is None else self.origin
        return merged([*within(self.passed, 0, step), *within(self.skip, begin, step)])

    def passing(self, step: int, count: int) -> Self:
        """Return the history of a job that passes over so many steps from one on."""
        return replace(self, passed=merged([*self.passed_before(step), (step, step + count)]))

    def state(self, at: int) -> State:
        """Return the entries of a state.

        Args:
            at: batches of the run, from its beginning, that are had or passed over.
        """
        if not self.layouts.layouts:
            return {}
        step = self.first + at
        passed = [list(steps) for steps in self.passed_before(step)]
        hidden = {"step": step} if self.padded else {}
        return hidden | {"layouts": self.layouts.state()} | ({"skipped": passed} if passed else {})


def new_history(skip: Ranges, *, parts: int) -> History:
    """Return the history of a job that begins.

    Args:
        skip: steps to pass over.
        parts: mini-epochs of an epoch.
    """
    return History(skip=skip, layouts=Layouts(parts=parts))


def within(ranges: Ranges, begin: int, end: int) -> Ranges:
    """Return the parts of ranges between two steps."""
    parts = ((max(a, begin), min(b, end)) for a, b in ranges)
    return tuple((a, b) for a, b in parts if a < b)
