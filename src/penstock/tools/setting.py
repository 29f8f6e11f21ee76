"""`Setting`: an executor and a number of workers, for measurements and reports."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.wording import counted

__all__ = ["Setting"]


@dataclass(frozen=True)
class Setting:
    """An executor and a number of workers, as arguments of `penstock.DataLoader`."""

    executor: str
    workers: int

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
