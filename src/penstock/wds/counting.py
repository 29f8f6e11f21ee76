"""Stages that choose samples by their number."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count as counter
from itertools import islice
from typing import Any

from penstock.errors import ConfigError
from penstock.order.hashing import mix
from penstock.wds.steps import Context, Counted, Stage, Step

__all__ = ["rsample", "slice"]


class slice(Stage):
    """``itertools.islice`` with these arguments."""

    def __init__(self, *args: int | None) -> None:
        islice((), *args)  # its errors about numbers that make no sense
        start, stop, step = (0, *args, None) if len(args) == 1 else (*args, *(None,) * (3 - len(args)))
        self.numbers = (start or 0, stop, step or 1)

    def begin(self, source: Step, context: Context, own: Any) -> Step:
        """A `Step` over the source."""
        return Counted(source, self._some, own)

    def _some(self, source: Step, count: int) -> Iterator[tuple[int, Any]]:
        start, stop, step = self.numbers
        if stop is not None and count >= stop:
            return
        for number, item in zip(counter(count), source, strict=False):
            if number >= start and (number - start) % step == 0:
                yield number + 1, item
            if stop is not None and number + 1 >= stop:
                return


class rsample(Stage):
    """Each sample with a probability, decided by the pipeline's seed, its epoch and the sample's number."""

    def __init__(self, p: float = 0.5) -> None:
        if not 0 <= p <= 1:
            raise ConfigError(f"p must be from 0 to 1, got {p}")
        self.p = p

    def begin(self, source: Step, context: Context, own: Any) -> Step:
        """A `Step` over the source."""
        key = context.key("rsample", common=False)
        limit = int(self.p * (1 << 64))

        def some(source: Step, count: int) -> Iterator[tuple[int, Any]]:
            for number, item in zip(counter(count), source, strict=False):
                if mix(key, number) < limit:
                    yield number + 1, item

        return Counted(source, some, own)
