"""Objects of a user's that have a state, or none, in a module that worker processes can import."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info


def share(n: int) -> range:
    """The part of 0..n-1 that this worker has: every so many."""
    info = get_worker_info()
    return range(n) if info is None else range(info.id, n, info.num_workers)


class CountingMap(Dataset[Any]):
    """Map-style; items depend on how many this copy has served, and on its own generator."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.served = 0
        self.noise = torch.Generator().manual_seed(5)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Any:
        self.served += 1
        return index, self.served, int(torch.randint(1000, (), generator=self.noise))

    def state_dict(self) -> dict[str, Any]:
        return {"served": self.served, "noise": self.noise.get_state().tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.served = state["served"]
        self.noise.set_state(torch.tensor(state["noise"], dtype=torch.uint8))


class TensorMap(Dataset[int]):
    """Its state is a tensor that it goes on writing into."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.seen = torch.zeros(n, dtype=torch.int64)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        self.seen[index] += 1
        return int(self.seen.sum()) * 100 + index

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "nested": {"list": [self.seen]}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen.copy_(state["seen"])


class PlainStream(IterableDataset[int]):
    """No state at all."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        yield from share(self.n)


class DrawingStream(PlainStream):
    """No state, and draws from the global generators."""

    def __iter__(self) -> Iterator[Any]:
        for item in share(self.n):
            yield item, random.random(), float(np.random.rand()), float(torch.rand((), dtype=torch.float64))


class UnevenStream(PlainStream):
    """Worker 0 has nothing, the last one most."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        yield from range(self.n) if info is None else range(info.id * 100, info.id * 100 + info.id * self.n)


class StatefulStream(PlainStream):
    """The data set has the state: the place, its own generator, and how many epochs it has been through."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.place = 0
        self.epochs = 0
        self.noise = random.Random(3)
        self.start: int | None = None

    def __iter__(self) -> Iterator[Any]:
        self.place = 0 if self.start is None else self.start
        self.start = None
        for item in share(self.n)[self.place :]:
            self.place += 1
            yield item, self.epochs, self.noise.random()
        self.epochs += 1

    def state_dict(self) -> dict[str, Any]:
        version, words, gauss = self.noise.getstate()
        return {"place": self.place, "epochs": self.epochs, "noise": [version, list(words), gauss]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start, self.epochs = state["place"], state["epochs"]
        version, words, gauss = state["noise"]
        self.noise.setstate((version, tuple(words), gauss))


class DrawingStatefulStream(StatefulStream):
    """A state, and draws from the global generators beside it."""

    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            yield *item, random.random(), float(np.random.rand()), float(torch.rand((), dtype=torch.float64))


class Items(Iterator[int]):
    """An iterator that has the state."""

    def __init__(self, items: range) -> None:
        self.items = items
        self.place = 0

    def __next__(self) -> int:
        if self.place >= len(self.items):
            raise StopIteration
        self.place += 1
        return self.items[self.place - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class IteratorStream(PlainStream):
    """The iterator has the state, and the data set counts how often it was asked for one."""

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.asked = 0

    def __iter__(self) -> Iterator[Any]:
        self.asked += 1
        return Items(share(self.n))


class AskedStream(IteratorStream):
    """Its items say how often this copy was iterated."""

    def __iter__(self) -> Iterator[Any]:
        self.asked += 1
        return Asked(share(self.n), self.asked)


class Asked(Items):
    def __init__(self, items: range, asked: int) -> None:
        super().__init__(items)
        self.asked = asked

    def __next__(self) -> Any:
        return super().__next__(), self.asked


class BothStream(IterableDataset[int]):
    """One object that is data set and iterator, and begins anew at each ``iter()``."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.place = 0

    def __iter__(self) -> Iterator[int]:
        self.place = 0
        return self

    def __next__(self) -> int:
        items = share(self.n)
        if self.place >= len(items):
            raise StopIteration
        self.place += 1
        return items[self.place - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class ToldStream(StatefulStream):
    """It can be told which epoch it is in, beside counting them."""

    def set_epoch(self, epoch: int) -> None:
        self.epochs = epoch


class HubStream(PlainStream):
    """As Hugging Face's iterable data sets do it: no state before the first item, one that stays at the end after it,
    and a loaded one counts for its own epoch only.
    """

    def __init__(self, n: int) -> None:
        super().__init__(n)
        self.epoch = 0
        self.state: dict[str, Any] | None = None
        self.start: dict[str, Any] | None = None

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.state = {"place": 0, "epoch": self.epoch}
        if self.start is not None and self.start["epoch"] == self.epoch:
            self.state = dict(self.start)
        self.start = None
        items = list(share(self.n))
        random.Random(self.epoch).shuffle(items)
        for item in items[self.state["place"] :]:
            self.state["place"] += 1
            yield item

    def state_dict(self) -> Any:
        return None if self.state is None else dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = dict(state)


class ChangingStream(StatefulStream):
    """Keys of its state come and go."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), f"at {self.place}": {"deep": [self.place]}, "text": "x" * self.place}


class BufferStream(StatefulStream):
    """A state of a megabyte, so that it is not taken after each batch."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "buffer": "x" * (1 << 20)}


class FailingStream(StatefulStream):
    """Every fifth item is an error, and the items after it come all the same."""

    def __iter__(self) -> Iterator[Any]:
        return Failing(super().__iter__())


class Failing(Iterator[Any]):
    def __init__(self, items: Iterator[Any]) -> None:
        self.items = items

    def __next__(self) -> Any:
        item = next(self.items)
        if item[0] % 5 == 3:
            raise LookupError(f"item {item[0]}")
        return item


class CountingCollate:
    """A collate function with a state."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, samples: list[Any]) -> Any:
        self.calls += 1
        return self.calls, samples

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


class StatefulSampler:
    """As torchdata's StatefulDistributedSampler: the sampler counts, its iterator is a generator."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.yielded = 0
        self.start = 0
        self.passes = 0

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        self.yielded, self.start = self.start, 0
        order = list(range(self.n))
        random.Random(self.passes).shuffle(order)
        for index in order[self.yielded :]:
            self.yielded += 1
            yield index
        self.passes += 1

    def state_dict(self) -> dict[str, Any]:
        return {"yielded": self.yielded, "passes": self.passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start, self.passes = state["yielded"], state["passes"]


class IteratorSampler:
    """The sampler's iterator has the state, not the sampler."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        return Items(range(self.n)[::-1])


class StatefulBatches:
    """A batch sampler with a state and uneven batches."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.place = 0
        self.start = 0

    def __iter__(self) -> Iterator[list[int]]:
        self.place, self.start = self.start, 0
        while self.place < self.n:
            begin, self.place = self.place, min(self.n, self.place + 1 + self.place % 3)
            yield list(range(begin, self.place))

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["place"]


class ShufflingSampler:
    """No state; shuffles with Python's or NumPy's global generator, as many do."""

    def __init__(self, n: int, numpy: bool) -> None:
        self.n = n
        self.numpy = numpy

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        if self.numpy:
            return iter(np.random.permutation(self.n).tolist())
        order = list(range(self.n))
        random.shuffle(order)
        return iter(order)


def as_they_are(samples: list[Any]) -> list[Any]:
    """A collate function that does nothing."""
    return samples


def bad_init(worker: int) -> None:
    raise ValueError(f"worker {worker} cannot start")
