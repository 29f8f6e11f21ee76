"""Filters out of generator functions: ``filter(options)`` is a stage, and pickles as long as the options do.

The first of them is `map`, which all others that look at one sample after the other are made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatch
from functools import update_wrapper
from typing import Any

from penstock.wds.handlers import Handler, reraise_exception, settle
from penstock.wds.iterators import Context, Replayed, Stage, Step, Through, memoryless

__all__ = ["FilterFunction", "RestCurried", "map", "pipelinefilter"]

Samples = Iterable[Any]


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


@memoryless
def _map(data: Samples, f: Callable[[Any], Any], handler: Handler = reraise_exception) -> Iterator[Any]:
    """``f`` of each sample. None drops it; a dict keeps the ``__key__`` of the sample it was made of.

    Args:
        f: of one sample.
        handler: what becomes of an error of ``f``, such as `warn_and_continue`; by default it is raised.
    """
    for sample in data:
        try:
            result = f(sample)
        except Exception as error:
            if settle(handler, error):
                continue
            return
        if result is None:
            continue
        if isinstance(sample, dict) and isinstance(result, dict) and "__key__" in sample:
            result["__key__"] = sample["__key__"]
        yield result


def _each(data: Samples, handler: Handler, f: Callable[[Any], Any]) -> Iterator[Any]:
    """``f`` of each sample; errors go to the handler."""
    for sample in data:
        try:
            result = f(sample)
        except Exception as error:
            if settle(handler, error):
                continue
            return
        yield result


def _matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a field's name matches one of the patterns, with a dot before it or without."""
    return any(fnmatch(name, pattern) or fnmatch("." + name, pattern) for pattern in patterns)


map = RestCurried(_map)
