"""Sources for mixtures, at module level so that they travel to workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import Dataset, IterableDataset, get_worker_info

from penstock import generator


class Numbers(Dataset[int]):
    """``base, base + 1, ...``"""

    def __init__(self, base: int, n: int) -> None:
        self.base, self.n = base, n
        self.fingerprint = f"numbers {base} {n}"

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.n:
            raise IndexError(index)
        return self.base + index


class Drawing(Numbers):
    """The number with a draw of the sample's own generator."""

    pure = True

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index), int(generator().integers(1 << 30))


class Failing(Numbers):
    def __getitem__(self, index: int) -> int:
        raise RuntimeError(f"no {index}")


class Stream(IterableDataset[int]):
    """Numbers as a stream, each worker's own; with ``stateful`` it has a state."""

    def __init__(self, base: int, n: int) -> None:
        self.base, self.n = base, n
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(self.base + first, self.base + self.n, step))


class StatefulStream(Stream):
    def __init__(self, base: int, n: int) -> None:
        super().__init__(base, n)
        self.at = 0
        self.resume = 0

    def __iter__(self) -> Iterator[int]:
        self.at, self.resume = self.resume, 0
        while self.at < self.n:
            self.at += 1
            yield self.base + self.at - 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.resume = state["at"]
