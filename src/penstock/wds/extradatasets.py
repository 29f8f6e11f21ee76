"""Small datasets, in the module where programs import them from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset

from penstock.wds.utils import PipelineStage, repeatedly  # noqa: F401


class MockDataset(IterableDataset[Any]):
    """One sample, repeated ``length`` times, to benchmark the stages after it."""

    def __init__(self, sample: Any, length: int) -> None:
        self.sample, self.length = sample, length

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.length):
            yield self.sample


class with_epoch(IterableDataset[Any]):
    """Exactly ``length`` items of a source per iteration; the next iteration continues where the last one ended."""

    def __init__(self, dataset: Iterable[Any], length: int) -> None:
        self.dataset, self.length = dataset, length
        self._source: Iterator[Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_source": None}

    def __iter__(self) -> Iterator[Any]:
        left = self.length
        while left > 0:
            begun, is_new = left, self._source is None
            if self._source is None:
                self._source = iter(self.dataset)
            for item in islice(self._source, left):
                left -= 1
                yield item
            if left:
                self._source = None
                if is_new and left == begun:  # a source without items
                    return


class with_length(IterableDataset[Any]):
    """A dataset with a given ``len``; its items do not change."""

    def __init__(self, dataset: Iterable[Any], length: int) -> None:
        self.dataset, self.length = dataset, length

    def __iter__(self) -> Iterator[Any]:
        return iter(self.dataset)

    def __len__(self) -> int:
        return self.length
