"""`History`: the steps of a job until an iterator starts: their layouts, and the skipped ones.

state     layouts, skipped steps  ->  the number of the iterator's first step
skip=     steps to leave out      ->  the iterator's remaining batches
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
    """The job's history until an epoch iterator starts.

    Attributes:
        skip: steps that this loader leaves out.
        layouts: how steps were distributed to ranks.
        passed: steps that any loader of the job left out.
        origin: first step of this loader; None if it has loaded a state and has not started.
        first: first step of the iterator.
        padded: whether steps may consist of padding only. Positions do not tell how many of those were delivered.
        stood: next step according to the loaded state; None without one, or once the loader has started.
    """

    skip: Ranges = ()
    layouts: Layouts = field(default_factory=Layouts)
    passed: Ranges = ()
    origin: int | None = 0
    first: int = 0
    padded: bool = False
    stood: int | None = None

    def read(self, state: Mapping[str, Any]) -> Self:
        """Return the history from a state, for a job that this loader continues.

        Raises:
            StateError: the state is damaged.
        """
        entries = state.get("skipped", [])
        stood = read_int(state, "step", of="DataLoader") if "step" in state else None
        try:
            passed = ranges_of(entries)
        except ConfigError as error:
            raise StateError(f"the state of this DataLoader is damaged: skipped is {entries!r}") from error
        return replace(self, layouts=Layouts.read(state, self.layouts.parts), passed=passed, origin=None, stood=stood)

    def followed(self, run: BatchEpochPlan) -> Self:
        """Return the history until an epoch plan starts.

        Raises:
            ConfigError: steps are to be skipped, but the plan's batches have no step numbers.
        """
        share = run.rank_partition
        if share is None:
            if self.skip:
                raise ConfigError(f"skip= needs numbered steps, and {type(run).__name__} has none: omit skip=")
            return self
        layouts = self.layouts.followed(share, self.stood)
        first = layouts.step_of(share)
        origin = first if self.origin is None else min(first, self.origin)
        padded = share.partition.padded >= share.partition.world_size
        return replace(self, layouts=layouts, first=first, origin=origin, padded=padded, stood=None)

    def left(self, run: BatchEpochPlan, skipped: int = 0) -> BatchEpochPlan:
        """Return the rest of an epoch plan, without skipped steps and its first ``skipped`` remaining batches."""
        passed: Ranges = ()
        if self.skip:
            first = self.first
            passed = tuple((begin - first, end - first) for begin, end in within(self.skip, first, first + len(run)))
        if skipped:
            passed = merged([(0, RemainingBatches(run, passed).at(skipped)), *passed])
        return RemainingBatches(run, passed) if passed else run

    def passed_before(self, step: int) -> Ranges:
        """Return the skipped steps before a step."""
        if not self.passed and not self.skip:
            return ()
        begin = step if self.origin is None else self.origin
        return merged([*within(self.passed, 0, step), *within(self.skip, begin, step)])

    def passing(self, step: int, count: int) -> Self:
        """Return the history of a job that skips ``count`` steps from a step on."""
        return replace(self, passed=merged([*self.passed_before(step), (step, step + count)]))

    def state(self, at: int) -> State:
        """Return the entries for a state.

        Args:
            at: number of batches of the plan that were delivered or skipped.
        """
        if not self.layouts.layouts:
            return {}
        step = self.first + at
        passed = [list(steps) for steps in self.passed_before(step)]
        hidden = {"step": step} if self.padded else {}
        return hidden | {"layouts": self.layouts.state()} | ({"skipped": passed} if passed else {})


def new_history(skip: Ranges, *, parts: int) -> History:
    """Return the history of a new job.

    Args:
        skip: steps to leave out.
        parts: mini-epochs per epoch.
    """
    return History(skip=skip, layouts=Layouts(parts=parts))


def within(ranges: Ranges, begin: int, end: int) -> Ranges:
    """Return the ranges clipped to the steps from ``begin`` to ``end``."""
    parts = ((max(a, begin), min(b, end)) for a, b in ranges)
    return tuple((a, b) for a, b in parts if a < b)
