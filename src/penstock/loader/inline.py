"""The inline executor: batches are made where they are asked for, in the caller's thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

from penstock.loader.fetch import Fetch, Task, preserved_generators

__all__ = ["InlineBatches"]


class InlineBatches:
    """Batches of the tasks, one at a time. A batch that fails raises in its place; the next call goes on."""

    def __init__(self, tasks: Iterator[Task], fetch: Fetch) -> None:
        self._tasks = tasks
        self._fetch = fetch

    def __iter__(self) -> InlineBatches:
        return self

    def __next__(self) -> Any:
        task = next(self._tasks)
        with preserved_generators() if self._fetch.seed_globals else nullcontext():
            return self._fetch(task)
