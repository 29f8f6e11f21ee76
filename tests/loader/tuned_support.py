"""Loaders whose batches are made by certain settings, one after the other."""

from __future__ import annotations

from typing import Any

from penstock import DataLoader
from penstock.loader.autotune import Autotuner
from penstock.loader.setting import Setting
from penstock.loader.throughput import Throughput

P1, P2 = Setting("process", 1), Setting("process", 2)
T1, T2 = Setting("thread", 1), Setting("thread", 2)


class Count:
    """Enough is known after so many batches."""

    enough = False

    def __init__(self, count: int) -> None:
        self.count = count
        self.found = Throughput()

    def begin(self, now: float) -> None: ...

    def add(self, *_: Any) -> bool:
        self.count -= 1
        return self.count == 0

    def end(self) -> None: ...


class Script(Autotuner):
    """Goes through certain settings, with so many batches each; then stays with the last one, or goes back."""

    def __init__(self, settings: list[Setting], each: list[int], *, back: Setting | None = None) -> None:
        super().__init__(["process"], inline="never", cores=2, persistent=False)
        self.again = False
        self.left = [*settings[1:], *([back] if back else [])]
        self.each = iter(each)
        self.current = settings[0]

    def search_again(self, now: float) -> bool:
        if not self.again or not self.decided:
            return False
        self.again = self.decided = self.settled = False
        return True

    def meter(self, depth: int) -> Any:
        return Count(next(self.each, 1))

    def note(self, found: Throughput, error: str = "") -> None:
        self.current = self.left.pop(0) if self.left else self.current
        self.decided = not self.left
        self.chosen = self.current if self.decided else None


def scripted(loader: DataLoader[Any], *args: Any, **options: Any) -> DataLoader[Any]:
    loader._tuner = Script(*args, **options)
    return loader
