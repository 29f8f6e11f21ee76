"""Loaders whose batches are made by certain numbers of workers, one after the other."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from penstock import DataLoader
from penstock.loader.autotune import Autotuner, Throughput
from penstock.loader.make import fetcher_of
from penstock.loader.workers import Workers


class Script(Autotuner):
    """Goes through certain numbers of workers, with so many batches each, and stays with the last one."""

    def __init__(self, executor: str, counts: list[int], each: list[int]) -> None:
        super().__init__(executor, inline=False, cores=64)
        self.workers, *self.left = counts
        self.each = list(each)
        self.count = self.each.pop(0)
        self.failed: list[Exception] = []

    def _measure(self, *_: Any) -> bool:
        self.count -= 1
        return self.count == 0

    def fail(self, error: Exception) -> None:
        self.failed.append(error)
        self.left = []
        self.workers = self.chosen = 1

    def note(self, found: Throughput) -> None:
        self.workers = self.left.pop(0) if self.left else self.workers
        self.count = self.each.pop(0) if self.each else 1
        self.chosen = None if self.left else self.workers


def scripted(loader: DataLoader[Any], counts: list[int], each: list[int]) -> DataLoader[Any]:
    loader._tuner = Script(loader.executor, counts, each)
    config = replace(loader._workers.config, num_workers=counts[0])
    loader._workers = Workers(config, partial(fetcher_of, loader.consumer))
    return loader
