"""Data sets whose stages take known times: they sleep as storage does, or compute."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

from penstock.stages import stage


def spin(seconds: float) -> None:
    """Compute for so long, by the processor's clock."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class Known(Dataset[Any]):
    """Sleeps ``read`` seconds, computes ``decode`` and ``augment`` seconds for each sample."""

    def __init__(self, *, read: float = 0.0, decode: float = 0.0, augment: float = 0.0, size: int = 400) -> None:
        self.read, self.decode, self.augment, self.size = read, decode, augment, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with stage("read"):
            time.sleep(self.read)
        with stage("decode"):
            spin(self.decode)
        with stage("augment"):
            spin(self.augment)
        return torch.full((16,), float(index)), index


class Pure(Known):
    """The same, which threads may ask."""

    pure = True


class Cold(Known):
    """Sleeps only the first time that any process asks for a sample."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen = torch.zeros(self.size, dtype=torch.bool).share_memory_()

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        with stage("read"):
            if not self.seen[index]:
                time.sleep(self.read)
                self.seen[index] = True
        with stage("decode"):
            spin(self.decode)
        return torch.full((16,), float(index)), index


class Stream(IterableDataset[Any]):
    """Few samples, in the order of their own, by every worker."""

    def __init__(self, size: int = 40, decode: float = 0.001) -> None:
        self.size, self.decode = size, decode

    def __iter__(self) -> Iterator[int]:
        for number in range(self.size):
            with stage("decode"):
                spin(self.decode)
            yield number


class Drawing(Dataset[Any]):
    """Draws from torch's global generator, as transforms do."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.rand(())


class Broken(Known):
    """Its tenth sample cannot be loaded."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == 9:
            raise KeyError("sample nine is missing")
        return super().__getitem__(index)


class ThreadShy(Known):
    """Cannot be asked by any thread but the main one, and says nothing of that."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        import threading

        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("this handle belongs to another thread\nand more")
        return super().__getitem__(index)


def slow_collate(samples: Sequence[Any]) -> list[Any]:
    """Computes two milliseconds a sample."""
    spin(0.002 * len(samples))
    return list(samples)
