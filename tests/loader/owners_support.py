"""Users' data sets whose states belong to one worker each, in a module that worker processes can import."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from state_support import share
from torch.utils.data import Dataset, IterableDataset, get_worker_info


class Span(IterableDataset[int]):
    """The numbers from ``start`` to ``end``, as in torch's documentation: `split_span` gives each worker a part."""

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end
        self.at: int | None = None

    def __iter__(self) -> Iterator[int]:
        first, self.at = (self.start if self.at is None else self.at), None
        for number in range(first, self.end):
            self.at = number + 1
            yield number
        self.at = None

    def state_dict(self) -> dict[str, Any]:
        return {"start": self.start, "end": self.end, "at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start, self.end, self.at = state["start"], state["end"], state["at"]


def split_span(worker: int) -> None:
    """Leave this worker's copy of a `Span` its part of it."""
    info = get_worker_info()
    assert info is not None
    span: Any = info.dataset
    size = -(-(span.end - span.start) // info.num_workers)
    span.start += size * worker
    span.end = min(span.end, span.start + size)


class Augmented(Dataset[Any]):
    """Map-style; draws from a generator of its own, which `seed_noise` seeds in each worker."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.noise = np.random.default_rng(0)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        return index, float(self.noise.random())

    def state_dict(self) -> dict[str, Any]:
        return {"noise": self.noise.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.noise.bit_generator.state = state["noise"]


class GlobalMap(Dataset[Any]):
    """Map-style; draws from torch's global generator, which is its state."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(()).item()

    def state_dict(self) -> dict[str, Any]:
        return {"generator": torch.get_rng_state().tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(torch.tensor(state["generator"], dtype=torch.uint8))


class GlobalStream(GlobalMap, IterableDataset[Any]):
    """The same as a stream, with as many more bytes in its state."""

    def __init__(self, n: int, nbytes: int = 0) -> None:
        super().__init__(n)
        self.place = 0
        self.more = "x" * nbytes

    def __iter__(self) -> Iterator[Any]:
        while self.place < self.n:
            self.place += 1
            yield self.place, torch.rand(()).item()
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "place": self.place, "more": self.more}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.place = state["place"]


def seed_noise(worker: int) -> None:
    """Seed this worker's copy of an `Augmented`."""
    del worker
    info = get_worker_info()
    assert info is not None
    dataset: Any = info.dataset
    dataset.noise = np.random.default_rng(info.seed)


class EpochOrdered(IterableDataset[int]):
    """Shuffled by an epoch that the trainer chooses before each pass."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.epoch = 0
        self.place = 0
        self.start = 0

    def choose(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.n))
        random.Random(self.epoch).shuffle(order)
        self.place, self.start = self.start, 0
        mine = [order[number] for number in share(self.n)]
        while self.place < len(mine):
            self.place += 1
            yield mine[self.place - 1]
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.start = state["epoch"], state["place"]


class LateState(IterableDataset[int]):
    """Has no state before its ``__iter__`` has run: what that is made of is made there."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.start = 0

    def __iter__(self) -> Iterator[int]:
        self.mine = share(self.n)
        self.place, self.start = self.start, 0
        return self._rest()

    def _rest(self) -> Iterator[int]:
        while self.place < len(self.mine):
            self.place += 1
            yield self.mine[self.place - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["place"]


class LaterState(LateState):
    """The same with ``__iter__`` as a generator function: nothing of it runs before the first item is asked for."""

    def __iter__(self) -> Iterator[int]:
        yield from super().__iter__()


class NoisyItems(Iterator[Any]):
    """An iterator that has the state: its place and a generator, which it seeds from torch's global one."""

    def __init__(self, items: range) -> None:
        self.items = items
        self.place = 0
        self.noise = np.random.default_rng(int(torch.empty((), dtype=torch.int64).random_()))

    def __next__(self) -> Any:
        if self.place >= len(self.items):
            raise StopIteration
        self.place += 1
        return self.items[self.place - 1], float(self.noise.random())

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "noise": self.noise.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]
        self.noise.bit_generator.state = state["noise"]


class NoisyIterators(IterableDataset[Any]):
    """Its iterators have the state."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[Any]:
        return NoisyItems(share(self.n))


class TorchDrawing(IterableDataset[Any]):
    """Its iterators have the state, and draw from torch's global generator and no other."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[Any]:
        return TorchDraws(share(self.n))


class TorchDraws(Iterator[Any]):
    def __init__(self, items: range) -> None:
        self.items = items
        self.place = 0

    def __next__(self) -> Any:
        if self.place >= len(self.items):
            raise StopIteration
        self.place += 1
        return self.items[self.place - 1], float(torch.rand((), dtype=torch.float64))

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class GlobalDraws(Dataset[Any]):
    """Map-style; no state, and draws from the global generators."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        return index, random.random(), float(np.random.rand()), float(torch.rand((), dtype=torch.float64))
