"""Samples that cannot be loaded, for the tests of `on_error`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.loader.messages import BatchMetrics
from penstock.loader.on_error import Failure, OnError

KEY = 0x0123456789ABCDEF
Load = Callable[[Any, int], Any]


def loads(*bad: Any, error: type[Exception] = KeyError) -> Load:
    """Loads index times ten, but not these."""

    def load_one(index: Any, key: int) -> Any:
        if index in bad:
            raise error(f"sample {index} is bad")
        return index * 10

    return load_one


def all_but(*good: int) -> Load:
    def load_one(index: int, key: int) -> int:
        if index not in good:
            raise ValueError(index)
        return index * 10

    return load_one


def notes(error: BaseException) -> str:
    return "\n".join(getattr(error, "__notes__", []))


def run(
    action: Any, load_one: Load, index: Any = 5, key: int = KEY, length: int | None = 100, **options: Any
) -> tuple[Any, list[Failure]]:
    """A sample and what was noted."""
    metrics = BatchMetrics()
    return OnError(action, **options).load(load_one, index, key, length, metrics), metrics.failures
