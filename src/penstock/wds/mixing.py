"""Several data sets as one: in turn, or at random."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch.utils.data import IterableDataset

from penstock.datasets.clock import Clock
from penstock.errors import ConfigError, StateError
from penstock.order.hashing import derive_key, mix
from penstock.plan.cursor import State, check_state, read_int
from penstock.wds.pipeline import DataPipeline
from penstock.wds.steps import SourceStep, context_here
from penstock.wds.steps import Step as _Step

__all__ = ["RandomMix", "RoundRobin"]


class _Mixed(IterableDataset[Any]):
    """What both have in common: which source comes next is a function of how many items there were."""

    def __init__(self, datasets: Sequence[Iterable[Any]], longest: bool) -> None:
        if not datasets:
            raise ConfigError("there is no data set to mix")
        self.datasets, self.longest = _apart(datasets), longest
        self._clock = Clock()
        self._resume: State | None = None
        self._begin(0)

    def _begin(self, epoch: int) -> None:
        self._epoch, self._number = epoch, 0
        self._steps: list[_Step] = []
        self._alive: list[int] = []

    def _choose(self, alive: list[int]) -> int:
        """One of the sources that have not ended."""
        raise NotImplementedError

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the next iteration, for the data sets as well."""
        if self._resume is not None and epoch == self._resume["epoch"]:
            return
        self._resume = None
        self._clock.set(epoch)
        for dataset in self.datasets:
            if hasattr(dataset, "set_epoch"):
                dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        resume, self._resume = self._resume, None
        if resume is None:
            self._begin(self._clock.next()[0])
            states: list[Any] = [None] * len(self.datasets)
            self._alive = list(range(len(self.datasets)))
        else:
            self._begin(int(resume["epoch"]))
            self._clock.resumed(self._epoch)
            self._number, self._alive, states = int(resume["number"]), list(resume["alive"]), resume["sources"]
        self._steps = [SourceStep(source, own) for source, own in zip(self.datasets, states, strict=True)]
        return self._items()

    def _items(self) -> Iterator[Any]:
        while self._alive:
            chosen = self._choose(self._alive)
            try:
                item = next(self._steps[chosen])
            except StopIteration:
                if not self.longest:
                    self._alive = []
                    return
                self._forget(chosen)
                continue
            self._number += 1
            yield item

    def _forget(self, source: int) -> None:
        self._alive = [other for other in self._alive if other != source]

    def _identity(self) -> State:
        return {"kind": type(self).__name__, "count": len(self.datasets), "longest": self.longest}

    def state_dict(self) -> State:
        """Where this one and its data sets are."""
        if self._resume is not None:
            return dict(self._resume)
        if not self._steps or not self._alive:
            return {**self._identity(), "epoch": self._clock.peek()[0], "number": 0, "alive": None, "sources": []}
        sources = [step.state()[0] for step in self._steps]
        return {
            **self._identity(),
            "epoch": self._epoch,
            "number": self._number,
            "alive": list(self._alive),
            "sources": sources,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there at the next iteration.

        Raises:
            StateError: it is of another mix.
        """
        check_state(state, self._identity(), of="mix")
        read_int(state, "epoch", of="mix")
        read_int(state, "number", of="mix")
        if "alive" not in state or (state["alive"] is not None and not self._fits(state)):
            raise StateError(
                "this state of a mix is damaged: 'alive', 'last' or 'sources' is missing or of other data sets. "
                "Start anew without the state"
            )
        if state["alive"] is None:
            self._resume = None
            self.set_epoch(int(state["epoch"]))
        else:
            self._resume = dict(state)

    def _fits(self, state: Mapping[str, Any]) -> bool:
        """Whether the sources of a state in mid-epoch can be those of this mix."""
        alive, sources, count = state["alive"], state.get("sources"), len(self.datasets)
        return (
            isinstance(alive, list)
            and all(one in range(count) for one in alive)
            and (isinstance(sources, list) and len(sources) == count)
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_steps": []}


def _apart(datasets: Sequence[Iterable[Any]]) -> list[Iterable[Any]]:
    """Pipelines that are there twice as two, since each has one state."""
    found: list[Iterable[Any]] = []
    for dataset in datasets:
        again = isinstance(dataset, DataPipeline) and any(dataset is other for other in found)
        found.append(dataset.compose() if again else dataset)  # type: ignore[attr-defined]
    return found


class RoundRobin(_Mixed):
    """One item of each data set in turn; ends with the first that ends, or with ``longest`` with the last."""

    def __init__(self, datasets: Sequence[Iterable[Any]], longest: bool = False) -> None:
        super().__init__(datasets, longest)
        self._last = -1

    def _begin(self, epoch: int) -> None:
        super()._begin(epoch)
        self._last = -1

    def _choose(self, alive: list[int]) -> int:
        self._last = next((number for number in alive if number > self._last), alive[0])
        return self._last

    def state_dict(self) -> State:
        """Where this one and its data sets are."""
        return {"last": self._last, **super().state_dict()}

    def _fits(self, state: Mapping[str, Any]) -> bool:
        return super()._fits(state) and state.get("last") in range(-1, len(self.datasets))

    def __iter__(self) -> Iterator[Any]:
        last = -1 if self._resume is None else int(self._resume["last"])
        items = super().__iter__()
        self._last = last
        return items


class RandomMix(_Mixed):
    """Items of data sets drawn at random; ends with the first that ends, or with ``longest`` with the last.

    Args:
        datasets: the sources.
        probs: their weights, equal by default.
        longest: go on with the others when one has ended.
        seed: draws are functions of it, the epoch, rank, worker and position.

    `penstock.Mixture` keeps proportions exactly.
    """

    def __init__(
        self,
        datasets: Sequence[Iterable[Any]],
        probs: Sequence[float] | None = None,
        longest: bool = False,
        *,
        seed: int = 0,
    ) -> None:
        weights = [1.0] * len(datasets) if probs is None else [float(p) for p in probs]
        if len(weights) != len(datasets) or any(not w >= 0 for w in weights) or not sum(weights) > 0:
            raise ConfigError(f"{len(datasets)} data sets need as many weights of 0 or more, got {probs}")
        self.probs, self.seed = weights, seed
        super().__init__(datasets, longest)

    def _begin(self, epoch: int) -> None:
        super()._begin(epoch)
        here = context_here()
        self._key = mix(derive_key(self.seed, epoch, "wds random mix"), *here.world, *here.worker)

    def _choose(self, alive: list[int]) -> int:
        total = sum(self.probs[number] for number in alive)
        if not total:
            return alive[0]
        point = mix(self._key, self._number, len(alive)) / 2**64 * total
        for number in alive:
            point -= self.probs[number]
            if point < 0:
                return number
        return alive[-1]
