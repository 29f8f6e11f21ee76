"""`Layouts`: how a job's steps were distributed to ranks, from the first step on.

    steps      0 ...... 500 | 500 ...... 800 | 800 ...
    layout     2 ranks of 8 | 3 ranks of 16  | 1 rank of 4

A step is one batch of all ranks together, counted from the start of epoch 0. A job that continues with other ranks or
another batch size gets a new layout. Within a layout, everything is computed by arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, Self

import numpy as np

from penstock.errors import ConfigError, StateError
from penstock.order.partition import REMAINDERS, Layout
from penstock.order.permutation import Indices
from penstock.plan.cursor import State, read_int

__all__ = ["Layout", "Layouts", "Stretch", "steps_per_epoch", "whole"]

_MOST = 32
"""Maximum number of layouts stored: the last ones."""
_NUMBERS = 10
"""Numbers of a layout in a state."""


class Stretch(Layout):
    """The steps of one mini-epoch: a layout that begins in it, with its own number of the first step."""

    @property
    def steps(self) -> int:
        """The number of steps to the end of the mini-epoch: batches of the rank with the most."""
        left = max(0, len(self.partition()) - self.skip)
        return left // self.batch_size if self.drop_last else -(-left // self.batch_size)

    def position(self, step: int) -> int:
        """Return the first position of a step, over all ranks."""
        return self.first + (step - self.step) * self.batch_size * self.ranks

    def positions(self, step: int, rank: int | None = None) -> tuple[Indices, Indices]:
        """Return the positions of a rank's batch, or of all ranks' sorted by rank, and the rank of each position."""
        of_rank = np.arange(self.ranks) if rank is None else np.array([rank])
        places = self.position(step) + of_rank[:, None] + self.ranks * np.arange(self.batch_size)
        inside = places < self.partition().end
        if self.drop_last:
            inside &= inside[:, -1:]
        return places[inside], np.repeat(of_rank, inside.sum(axis=1))

    def step_at(self, position: int) -> int:
        """Return the step that contains a position. It may be outside this stretch."""
        return self.step + (position - self.first) // (self.ranks * self.batch_size)

    def locate(self, position: int) -> tuple[int, int] | None:
        """Return the step and the rank of a position; None if no step of this stretch contains it."""
        step, rank = self.step_at(position), (position - self.first) % self.ranks
        inside = step >= self.step and position in self.positions(step, rank)[0]
        return (step, rank) if inside else None

    def step_of(self, now: Layout) -> int:
        """Return the step at which an epoch plan of this mini-epoch starts, or the next one."""
        end = self.step + self.steps
        if now.empty and now.first >= min(self.partition().end, self.samples):
            return end
        return min(end, max(self.step, self.step_at(now.first + self.ranks * self.batch_size - 1)))


def _parts(layout: Layout, epoch: int) -> Iterator[Stretch]:
    """Yield the mini-epochs of an epoch, from the start of a layout, all with the layout's first step."""
    begun = Stretch(*layout)
    if epoch > layout.epoch:
        begun = begun._replace(epoch=epoch, mini_epoch=0, done=0, base=0, skip=0)
    yield begun
    for part in range(begun.mini_epoch + 1, layout.parts):
        yield begun._replace(mini_epoch=part, skip=0)


@lru_cache(maxsize=256)
def _steps(layout: Layout, epoch: int) -> int:
    """Return the number of steps in an epoch, from the start of a layout."""
    return sum(part.steps for part in _parts(layout, epoch))


def steps_per_epoch(layout: Layout) -> int:
    """Return the number of steps in a whole epoch."""
    return _steps(layout, layout.epoch + 1)


def _stretches(layout: Layout, epoch: int) -> Iterator[Stretch]:
    """Yield the mini-epochs of an epoch, from the start of a layout."""
    step = layout.step
    if epoch > layout.epoch:
        step += _steps(layout, layout.epoch) + (epoch - layout.epoch - 1) * steps_per_epoch(layout)
    for part in _parts(layout, epoch):
        yield part._replace(step=step)
        step += part.steps


class Layouts:
    """The layouts of a job in order.

    Args:
        layouts: layouts of a state, oldest first.
        next_step: the next step, if some steps consist of padding only. At the end of an epoch, the position does not
            tell how many of those were delivered.
    """

    def __init__(self, layouts: Sequence[Layout] = (), next_step: int | None = None) -> None:
        self.layouts = tuple(layouts)
        self.next_step = next_step

    @classmethod
    def read(cls, state: Mapping[str, Any], parts: int = 1) -> Self:
        """Return the layouts of a state; none if the state is from before layouts existed.

        Raises:
            StateError: the layouts are damaged.
        """
        entries = state.get("layouts", [])
        fine = isinstance(entries, list) and all(map(_is_layout, entries))
        layouts = [Layout(*entry)._replace(parts=parts) for entry in entries] if fine else []
        fine = fine and all(a.step < b.step and a.epoch <= b.epoch for a, b in pairwise(layouts))
        if not fine or any(max(one.mini_epoch + 1, one.done) > parts for one in layouts):
            raise StateError(f"the state of this DataLoader is damaged: layouts is {entries!r}")
        return cls(layouts, read_int(state, "step", of="DataLoader") if "step" in state else None)

    def state(self, delivered: int) -> State:
        """Return the entries for a state, after so many batches of the epoch plan that these layouts follow."""
        if not self.layouts:
            return {}
        step = {} if self.next_step is None else {"step": self.next_step + delivered}
        return step | {"layouts": [list(one[: _NUMBERS + (one.excluded is not None)]) for one in self.layouts]}

    def followed(self, now: Layout) -> Layouts:
        """Return these layouts, plus that of an epoch plan if it differs from the last one.

        If the plan starts before the last layout, its own layout replaces all others, from the start of the job.
        """
        layouts = self._extended(now)
        is_padded = now.partition().padded >= now.ranks
        return Layouts(layouts, _last_stretch(layouts, now).step_of(now) if is_padded else None)

    def _extended(self, now: Layout) -> list[Layout]:
        layouts = list(self.layouts)
        if not layouts or _place(now) < _place(layouts[-1]):
            layouts = [whole(now)]
        stretch = _last_stretch(layouts, now)
        step = stretch.step_of(now)
        if self.next_step is not None and now.empty:
            step = min(max(stretch.step, self.next_step), step)
        # The plan starts with this step, and ends with the stretch.
        fits = now.first == stretch.position(step) and now.partition().end == stretch.partition().end
        if layouts[-1].rule == now.rule and (now.empty or fits):
            return layouts
        kept = [layout for layout in layouts if layout.step < step]
        # The last layout had no step.
        if 0 < len(kept) < len(layouts):
            return Layouts(kept, self.next_step)._extended(now)
        return [*kept, now._replace(step=step, rank=0)][-_MOST:]

    def step_of(self, now: Layout) -> int:
        """Return the first step of an epoch plan."""
        return _last_stretch(self.layouts, now).step_of(now)

    def layout(self, step: int) -> Layout:
        """Return the layout of a step.

        Raises:
            ConfigError: the step is negative, or its layout is no longer stored.
        """
        if step < 0:
            raise ConfigError(f"steps are counted from 0, got step {step}")
        found = [layout for layout in self.layouts if layout.step <= step]
        if not found:
            raise ConfigError(f"{self._forgotten()}, got step {step}")
        return found[-1]

    def at(self, step: int) -> Stretch:
        """Return the stretch that contains a step.

        Raises:
            ConfigError: as `layout`; also if the step does not exist.
        """
        layout = self.layout(step)
        rest, head, each = step - layout.step, _steps(layout, layout.epoch), steps_per_epoch(layout)
        if rest >= head and not each:
            raise ConfigError(f"an epoch of this job has no step, got step {step}")
        epoch = layout.epoch if rest < head else layout.epoch + 1 + (rest - head) // each
        return next(one for one in _stretches(layout, epoch) if step < one.step + one.steps)

    def in_epoch(self, epoch: int) -> Iterator[tuple[Stretch, int]]:
        """Yield the stretches of an epoch, each with the first step that the job did not run in it.

        Raises:
            ConfigError: the layouts are no longer stored.
        """
        first = self.layouts[0]
        if first.step and (epoch, 0, 0, 0) < (first.epoch, first.mini_epoch, first.base, first.skip):
            raise ConfigError(f"{self._forgotten()}, got epoch {epoch}")
        ends = [layout.step for layout in self.layouts[1:]]
        for layout, end in zip(self.layouts, [*ends, None], strict=True):
            for one in _stretches(layout, epoch) if epoch >= layout.epoch else ():
                stop = one.step + one.steps if end is None else min(one.step + one.steps, end)
                if stop > one.step:
                    yield one, stop

    def _forgotten(self) -> str:
        first = self.layouts[0]
        return (
            f"a state stores the last {_MOST} layouts of a job, here from step {first.step} in epoch {first.epoch} on"
        )


def whole(layout: Layout) -> Layout:
    """Return the same layout from the start of the job."""
    return layout._replace(step=0, epoch=0, mini_epoch=0, done=0, base=0, skip=0, rank=0)


def _place(layout: Layout) -> tuple[int, int, int]:
    return layout.epoch, layout.mini_epoch, layout.first


def _last_stretch(layouts: Sequence[Layout], now: Layout) -> Stretch:
    """Return the mini-epoch in which an epoch plan starts, in the last of some layouts."""
    return next(one for one in _stretches(layouts[-1], now.epoch) if one.mini_epoch >= now.mini_epoch)


def _is_layout(entry: Any) -> bool:
    """Return whether a state's entry is a valid layout."""
    if not isinstance(entry, list) or len(entry) not in (_NUMBERS, _NUMBERS + 1):
        return False
    numbers = entry[:_NUMBERS]
    valid = all(type(number) is int and 0 <= number < 1 << 62 for number in numbers)
    # Zero ranks or an empty batch would cause a division by zero.
    sizes = valid and numbers[6] > 0 and numbers[7] > 0 and numbers[9] < 2 * len(REMAINDERS)
    return sizes and max(numbers[4:6]) <= numbers[8] and (len(entry) == _NUMBERS or isinstance(entry[_NUMBERS], str))
