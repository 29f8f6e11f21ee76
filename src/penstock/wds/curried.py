"""Filters out of generator functions: ``filter(options)`` is a stage, and pickles as long as the options do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import update_wrapper
from typing import Any

from penstock.wds.steps import Context, Replayed, Stage, Step, Through

__all__ = ["FilterFunction", "RestCurried", "pipelinefilter"]


class FilterFunction(Stage):
    """A function of an iterator and options, with the options filled in."""

    def __init__(self, f: Callable[..., Iterator[Any]], *args: Any, **kw: Any) -> None:
        self.f, self.args, self.kw = f, args, kw

    def begin(self, source: Step, context: Context, own: Any) -> Step:
        """A `Step` over the source."""
        if getattr(self.f, "memoryless", False):
            return Through(source, self._filter)
        return Replayed(source, self._filter, own)

    def _filter(self, src: Any) -> Iterator[Any]:
        return self.f(src, *self.args, **self.kw)

    def run(self, src: Any = None) -> Iterator[Any]:
        """Filter an iterator."""
        return self._filter(src)

    def __repr__(self) -> str:
        return f"<{self.f.__name__} {self.args} {self.kw}>"


class RestCurried:
    """``filter(option, ...)``: a `FilterFunction`."""

    def __init__(self, f: Callable[..., Iterator[Any]]) -> None:
        self.f = f
        update_wrapper(self, f)

    def __call__(self, *args: Any, **kw: Any) -> FilterFunction:
        return FilterFunction(self.f, *args, **kw)


def pipelinefilter(f: Callable[..., Iterator[Any]]) -> RestCurried:
    """Make a filter of a generator function whose first argument is the source.

    It takes part in states by being run again from the start of the epoch, unless it is `memoryless`.
    """
    return RestCurried(f)
