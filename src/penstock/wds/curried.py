"""Filters made of generator functions: ``filter(options)`` is a stage, which pickles if its options do.

`map` is the first one; every filter that handles one sample at a time is built on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatch
from functools import update_wrapper
from typing import Any

from penstock.wds.handlers import Handler, reraise_exception, settle
from penstock.wds.iterators import Context, MemorylessStep, ReplayedStep, Stage, Step, memoryless

__all__ = ["FilterFunction", "RestCurried", "map", "pipelinefilter"]

Samples = Iterable[Any]


class FilterFunction(Stage):
    """A generator function of an iterator, with its options bound."""

    def __init__(self, f: Callable[..., Iterator[Any]], *args: Any, **kw: Any) -> None:
        self.f, self.args, self.kw = f, args, kw

    def begin(self, source: Step, context: Context, own: Any) -> Step:
        """Return a `Step` over the source."""
        if getattr(self.f, "memoryless", False):
            return MemorylessStep(source, self._filter)
        return ReplayedStep(source, self._filter, own)

    def _filter(self, src: Any) -> Iterator[Any]:
        return self.f(src, *self.args, **self.kw)

    def run(self, src: Any = None) -> Iterator[Any]:
        """Return the filtered iterator."""
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
    """Turn a generator function, whose first argument is the source, into a filter.

    To resume, it runs again from the start of the epoch, unless it is marked `memoryless`.
    """
    return RestCurried(f)


@memoryless
def _map(data: Samples, f: Callable[[Any], Any], handler: Handler = reraise_exception) -> Iterator[Any]:
    """Apply ``f`` to each sample. A result of None drops the sample; a dict keeps the sample's ``__key__``.

    Args:
        f: a function of one sample.
        handler: handles errors of ``f``, such as `warn_and_continue`; by default they are raised.
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
    """Apply ``f`` to each sample; errors go to the handler."""
    for sample in data:
        try:
            result = f(sample)
        except Exception as error:
            if settle(handler, error):
                continue
            return
        yield result


def _matches(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a field's name matches one of the patterns, with a leading dot or without."""
    return any(fnmatch(name, pattern) or fnmatch("." + name, pattern) for pattern in patterns)


map = RestCurried(_map)
