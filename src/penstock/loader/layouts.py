"""`Layouts`: how a job dealt its steps, from the first one to the present, and so where each step is.

    steps      0 ...... 500 | 500 ...... 800 | 800 ...
    layout     2 ranks of 8 | 3 ranks of 16  | 1 rank of 4

A step is a batch of all ranks together, counted from the beginning of epoch 0. A job that goes on with other ranks or
another batch size gets another layout; within one, everything is arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, Self

import numpy as np

from penstock.errors import ConfigError, StateError
from penstock.order import Partition
from penstock.order.partition import REMAINDERS
from penstock.order.permutation import Indices
from penstock.plan.epoch import Dealt

__all__ = ["Layout", "Layouts", "Stretch"]

_MOST = 32
"""Layouts that are kept: the last ones."""
_NUMBERS = 10  # of a layout in a state


class Layout(NamedTuple):
    """How the steps from one on are dealt.

    Attributes:
        step: the first step.
        epoch, mini_epoch, done, base, skip: where that begins, see `penstock.plan.share.MiniEpoch`.
        ranks: of the job.
        batch_size: of each rank.
        samples: of an epoch; batches, where the order is one of batches.
        ends: how epochs end: the number of the remainder's rule, and 3 more where a last short batch is left out.
        excluded: hash of the rows that are left out.
    """

    step: int
    epoch: int
    mini_epoch: int
    done: int
    base: int
    skip: int
    ranks: int
    batch_size: int
    samples: int
    ends: int
    excluded: str | None = None

    @classmethod
    def of(cls, step: int, dealt: Dealt) -> Self:
        """Return the layout of the steps from one on, which a bound plan begins with."""
        part = dealt.partition
        ends = REMAINDERS.index(part.remainder) + len(REMAINDERS) * dealt.drop_last
        place = dealt.epoch, dealt.mini_epoch, dealt.done, dealt.base, dealt.skip
        return cls(step, *place, part.world_size, dealt.batch_size, part.n, ends, dealt.excluded)

    @property
    def rule(self) -> tuple[Any, ...]:
        """All that is so for every epoch."""
        return self[6:]

    @property
    def whole(self) -> Self:
        """The same from the beginning of the job."""
        return self._replace(step=0, epoch=0, mini_epoch=0, done=0, base=0, skip=0)

    def steps_per_epoch(self, parts: int) -> int:
        """Return the steps of a whole epoch."""
        return sum(_counts(self, parts, False))

    def partition(self, epoch: int, part: int, parts: int, rank: int = 0) -> Partition:
        """Return the positions of a rank in a mini-epoch."""
        done, base = (self.done, self.base) if epoch == self.epoch else (0, 0)
        # A mini-epoch that was finished before the epoch was dealt out anew has nothing left.
        return Partition(
            self.samples,
            self.ranks,
            rank,
            mini_epochs=max(1, parts - done),
            mini_epoch=max(0, part - done),
            remainder=REMAINDERS[self.ends % len(REMAINDERS)],
            consumed=base if part >= done else self.samples,
        )

    def begin(self, epoch: int, part: int) -> int:
        """Return how many samples of a mini-epoch each rank has had before the layout."""
        return self.skip if (epoch, part) == (self.epoch, self.mini_epoch) else 0

    def stretches(self, epoch: int, parts: int) -> Iterator[Stretch]:
        """Yield the mini-epochs of an epoch, from where the layout begins on."""
        counts, step = _counts(self, parts, epoch == self.epoch), self.step
        if epoch > self.epoch:
            step += sum(_counts(self, parts, True)) + (epoch - self.epoch - 1) * sum(counts)
        for part, count in enumerate(counts):
            yield Stretch(self, epoch, part, parts, step, count)
            step += count


@lru_cache(maxsize=256)
def _counts(layout: Layout, parts: int, first: bool) -> tuple[int, ...]:
    """Return the batches of each mini-epoch, of the rank that has most: in the layout's first epoch, or in others."""
    epoch = layout.epoch if first else layout.epoch + 1
    counts = [0] * (layout.mini_epoch if first else 0)
    for part in range(len(counts), parts):
        left = max(0, len(layout.partition(epoch, part, parts)) - layout.begin(epoch, part))
        short = layout.ends < len(REMAINDERS)
        counts.append(-(-left // layout.batch_size) if short else left // layout.batch_size)
    return tuple(counts)


class Stretch(NamedTuple):
    """The steps of a mini-epoch in one layout.

    Attributes:
        layout: which one.
        epoch, part: the mini-epoch.
        parts: mini-epochs of an epoch.
        first: the first step.
        steps: how many.
    """

    layout: Layout
    epoch: int
    part: int
    parts: int
    first: int
    steps: int

    def partition(self, rank: int = 0) -> Partition:
        """Return the positions of a rank in the whole mini-epoch."""
        return self.layout.partition(self.epoch, self.part, self.parts, rank)

    def positions(self, step: int, rank: int) -> Indices:
        """Return the positions of a rank's batch."""
        size = self.layout.batch_size
        begin = self.layout.begin(self.epoch, self.part) + (step - self.first) * size
        found = self.partition(rank).positions(begin, begin + size)
        return found if len(found) == size or self.layout.ends < len(REMAINDERS) else found[:0]

    def all_positions(self, step: int) -> tuple[Indices, Indices]:
        """Return the positions of all ranks' batches, rank by rank, and which rank has each."""
        size, ranks, begin = self.layout.batch_size, self.layout.ranks, self.position(step)
        places = np.arange(begin, min(begin + size * ranks, self.partition().end))
        of_rank = (places - begin) % ranks
        if self.layout.ends >= len(REMAINDERS):
            full = np.bincount(of_rank, minlength=ranks)[of_rank] == size
            places, of_rank = places[full], of_rank[full]
        by_rank = np.argsort(of_rank, kind="stable")
        return places[by_rank], of_rank[by_rank]

    def position(self, step: int) -> int:
        """Return the position at which a step begins, over all ranks."""
        had = self.layout.begin(self.epoch, self.part) + (step - self.first) * self.layout.batch_size
        return self.partition().begin + had * self.layout.ranks

    def number(self, position: int) -> int:
        """Return which step of these has a position, or would have if there were as many."""
        local = (position - self.partition().begin) // self.layout.ranks - self.layout.begin(self.epoch, self.part)
        return local // self.layout.batch_size

    def locate(self, position: int) -> tuple[int, int] | None:
        """Return the step and the rank of a position; None if it is in no step of these."""
        whole, layout = self.partition(), self.layout
        if not whole.begin <= position < whole.end:
            return None
        local, rank = divmod(position - whole.begin, layout.ranks)
        step = self.first + (local - layout.begin(self.epoch, self.part)) // layout.batch_size
        had = self.first <= step < self.first + self.steps and len(self.positions(step, rank)) > 0
        return (step, rank) if had else None

    def step_of(self, dealt: Dealt) -> int:
        """Return the step that begins where a bound plan of the mini-epoch does, or behind that."""
        whole, layout = self.partition(), self.layout
        if dealt.empty and dealt.first >= min(whole.end, layout.samples):
            return self.first + self.steps
        local = -(-(dealt.first - whole.begin) // layout.ranks) - layout.begin(self.epoch, self.part)
        return self.first + min(self.steps, max(0, -(-local // layout.batch_size)))


class Layouts:
    """The layouts of a job, one after the other.

    Args:
        layouts: of a state, oldest first.
        parts: mini-epochs of an epoch.
    """

    def __init__(self, layouts: Sequence[Layout] = (), parts: int = 1) -> None:
        self.layouts = tuple(layouts)
        self.parts = parts

    @classmethod
    def read(cls, state: Mapping[str, Any], parts: int = 1) -> Self:
        """Return the layouts that a state holds: none, if it is older than they are.

        Raises:
            StateError: they are damaged.
        """
        entries = state.get("layouts", [])
        fine = isinstance(entries, list) and all(map(_is_layout, entries))
        layouts = [Layout(*entry) for entry in entries] if fine else []
        fine = fine and all(a.step < b.step and a.epoch <= b.epoch for a, b in pairwise(layouts))
        if not fine or any(max(one.mini_epoch + 1, one.done) > parts for one in layouts):
            raise StateError(f"the state of this DataLoader is damaged: layouts is {entries!r}")
        return cls(layouts, parts)

    def state(self) -> list[list[Any]]:
        """Return the entry of a state."""
        return [list(layout if layout.excluded else layout[:_NUMBERS]) for layout in self.layouts]

    def followed(self, dealt: Dealt, stood: int | None = None) -> Layouts:
        """Return these, and how a bound plan is dealt, if it is dealt otherwise than the last of them says.

        Args:
            dealt: how the plan is dealt.
            stood: the step before which the job stood, as a state says. Where an epoch had all its samples, its
                position does not say how many steps of padding there were.

        Who goes back behind the beginning of the last one counts as if the job had had no other layout.
        """
        now, layouts = Layout.of(0, dealt), list(self.layouts)
        if not layouts or _before(dealt, layouts[-1], dealt.parts):
            layouts = [now.whole]
        found = Layouts(layouts, dealt.parts)
        last, stretch = layouts[-1], found._last_stretch(dealt)
        step = stretch.step_of(dealt)
        if stood is not None and dealt.empty:
            step = min(max(stretch.first, stood), step)
        if last.rule == now.rule and (dealt.empty or _fits(dealt, stretch, step)):
            return found
        if kept := [layout for layout in layouts if layout.step < step]:
            if len(kept) < len(layouts):  # the last one had no step
                return Layouts(kept, dealt.parts).followed(dealt, stood)
        else:
            layouts = []
        return Layouts([*layouts, now._replace(step=step)][-_MOST:], dealt.parts)

    def step_of(self, dealt: Dealt) -> int:
        """Return the step that a bound plan begins with."""
        return self._last_stretch(dealt).step_of(dealt)

    def _last_stretch(self, dealt: Dealt) -> Stretch:
        return list(self.layouts[-1].stretches(dealt.epoch, self.parts))[dealt.mini_epoch]

    def at(self, step: int) -> Stretch:
        """Return where a step is.

        Raises:
            ConfigError: there is no such step, or nobody remembers.
        """
        if step < 0:
            raise ConfigError(f"steps are counted from 0 on, got step {step}")
        found = [layout for layout in self.layouts if layout.step <= step]
        if not found:
            raise ConfigError(f"{self._forgotten()}, got step {step}")
        layout = found[-1]
        rest, whole = step - layout.step, sum(_counts(layout, self.parts, False))
        head = sum(_counts(layout, self.parts, True))
        if rest >= head and not whole:
            raise ConfigError(f"an epoch of this job has no step, got step {step}")
        epoch = layout.epoch if rest < head else layout.epoch + 1 + (rest - head) // whole
        for stretch in layout.stretches(epoch, self.parts):
            if step < stretch.first + stretch.steps:
                return stretch
        raise AssertionError(step)

    def in_epoch(self, epoch: int) -> Iterator[Stretch]:
        """Yield the stretches of an epoch, each as far as the job had it in its layout.

        Raises:
            ConfigError: nobody remembers them.
        """
        first = self.layouts[0]
        if first.step and (epoch, 0, 0, 0) < (first.epoch, first.mini_epoch, first.base, first.skip):
            raise ConfigError(f"{self._forgotten()}, got epoch {epoch}")
        ends = [layout.step for layout in self.layouts[1:]]
        for layout, end in zip(self.layouts, [*ends, None], strict=True):
            for one in layout.stretches(epoch, self.parts) if epoch >= layout.epoch else ():
                count = one.steps if end is None else min(one.steps, end - one.first)
                if count > 0:
                    yield one._replace(steps=count)

    def _forgotten(self) -> str:
        first = self.layouts[0]
        return (
            f"a state keeps the last {_MOST} layouts of a job, here those from step {first.step} in epoch "
            f"{first.epoch} on"
        )


def _before(dealt: Dealt, layout: Layout, parts: int) -> bool:
    """Return whether a bound plan begins before a layout does."""
    place, begin = (dealt.epoch, dealt.mini_epoch), (layout.epoch, layout.mini_epoch)
    if place != begin:
        return place < begin
    return dealt.first < layout.partition(*begin, parts).begin + layout.skip * layout.ranks


def _fits(dealt: Dealt, stretch: Stretch, step: int) -> bool:
    """Return whether a bound plan begins with a step of a stretch, and ends where that does."""
    whole, layout = stretch.partition(), stretch.layout
    had = layout.begin(stretch.epoch, stretch.part) + (step - stretch.first) * layout.batch_size
    return dealt.first == whole.begin + had * layout.ranks and dealt.partition.end == whole.end


def _is_layout(entry: Any) -> bool:
    """Return whether an entry of a state is a layout."""
    if not isinstance(entry, list) or len(entry) not in (_NUMBERS, _NUMBERS + 1):
        return False
    numbers = entry[:_NUMBERS]
    whole = all(type(number) is int and 0 <= number < 1 << 62 for number in numbers)
    # Ranks and batches of nothing would divide by zero.
    sizes = whole and numbers[6] > 0 and numbers[7] > 0 and numbers[9] < 2 * len(REMAINDERS)
    return sizes and max(numbers[4:6]) <= numbers[8] and (len(entry) == _NUMBERS or isinstance(entry[_NUMBERS], str))
