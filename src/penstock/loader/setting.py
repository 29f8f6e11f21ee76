"""`Setting`: an executor and a number of workers, for measurements and reports."""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.loader.config import LoaderConfig
from penstock.wording import counted

__all__ = ["EXECUTOR_COST", "INLINE", "Setting"]

EXECUTOR_COST = {"auto": 0, "process": 1, "thread": 2, "inline": 3}
"""Rank of each executor: a lower rank slows the training in the program's own process less."""


@dataclass(frozen=True)
class Setting:
    """An executor and a number of workers, as arguments of `penstock.DataLoader`."""

    executor: str
    workers: int

    def of(self, config: LoaderConfig) -> LoaderConfig:
        """Return the config with this executor and number of workers."""
        return replace(config, executor=self.executor, num_workers=self.workers)

    @property
    def arguments(self) -> str:
        """The setting as arguments in Python code."""
        if not self.workers:
            return "num_workers=0"
        return f'executor="{self.executor}", num_workers={self.workers}'

    def __str__(self) -> str:
        if not self.workers:
            return "inline"
        if self.executor == "auto":
            return f"1 process, {counted(self.workers, 'thread')}"
        if self.executor == "ray":
            return counted(self.workers, "Ray worker")
        return counted(self.workers, "thread" if self.executor == "thread" else "process")


INLINE = Setting("inline", 0)
