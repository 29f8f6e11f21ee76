"""`MixtureStream`: iterable-style data sets mixed in fixed proportions, in each worker by itself.

Streams shard themselves over ranks and workers, so each worker interleaves what its own iterators give it; the
proportions hold to within less than one sample in every worker at every moment.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from penstock import distributed
from penstock.datasets.clock import Clock
from penstock.datasets.mixing import make_plan, split_sources
from penstock.errors import ConfigError, StateError
from penstock.plan.cursor import STATE_VERSION, State, check_state, read_int, read_ints
from penstock.stages import stage

__all__ = ["MixtureStream"]

_CHUNK = 256  # positions computed at a time
_END = object()


class MixtureStream(IterableDataset[Any]):
    """A `Mixture` of iterable-style data sets; `Mixture` makes it.

    Args:
        sources: pairs ``(dataset, weight)``.
        mode: ``"proportion"`` or ``"choose"`` (numbers of samples of the whole job); ``"repeat"`` and ``"upsample"``
            for sources that have a length.
        stop: ``"first"``: at the end of the first source that ends; ``"all"`` (default): once every source has come to
            its end, those that are shorter beginning anew; or a number of samples of the whole job.
        names: of the sources, for errors and the loader's statistics, which have the seconds of each as a stage.
        tag: items are ``(item, number of the source)``.

    Every iteration is a new epoch, unless `set_epoch` was called.

    Raises:
        ConfigError: arguments that make no sense, or (while iterating) a source that gives nothing.

    State: how many items this object has yielded, and the states of the sources, of their iterators where those have
    them; a source without any is gone through again up to its place. It fits the same ranks and workers alone.
    """

    def __init__(
        self,
        sources: Sequence[tuple[Any, Any]],
        *,
        mode: str = "proportion",
        stop: str | int | None = None,
        names: Sequence[str] | None = None,
        tag: bool = False,
    ) -> None:
        self.sources, weights = split_sources(sources)
        self.names = [f"source {i}" for i in range(len(self.sources))] if names is None else list(names)
        if len(set(self.names)) != len(self.sources):
            raise ConfigError(f"{len(self.sources)} sources need as many different names, got {self.names}")
        sizes = [_size(source) for source in self.sources]
        self._plan = make_plan(weights, sizes, mode, stop)
        self.tag = tag
        self._clock = Clock()
        self._told = -1  # how often the clock had been set when this object's epoch began
        self._epoch = -1
        self._resume: Mapping[str, Any] | None = None
        self._begin()

    def _begin(self) -> None:
        self._iterators: list[Iterator[Any] | None] = [None] * len(self.sources)
        self._yielded = 0
        self._turns = [0] * len(self.sources)  # how often each source has begun anew
        self._had = [0] * len(self.sources)  # items since it did

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_iterators": [None] * len(self.sources)}

    @property
    def epoch(self) -> int:
        """The epoch that is being read, or was last; before that the one that comes."""
        return self._clock.now() if self._resume is None else self._epoch

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the next iteration; told to sources that have ``set_epoch``."""
        if epoch < 0:
            raise ConfigError(f"epoch must be 0 or more, got {epoch}")
        if self._resume is None or epoch != self._epoch:
            self._resume = None
            self._clock.set(epoch)

    def counts(self, samples: int) -> dict[str, int]:
        """How many samples of each source are among the first ones that one worker yields."""
        return dict(zip(self.names, self._plan.interleave.counts(samples), strict=True))

    def __iter__(self) -> Iterator[Any]:
        self._begin()
        resume, self._resume = self._resume, None
        if resume is not None:
            self._clock.resumed(self._epoch)
            self._restore(resume)
        else:
            self._epoch, self._told = self._clock.next()
        limit = self._limit()
        while limit is None or self._yielded < limit:
            chunk = np.arange(self._yielded, self._yielded + _CHUNK)
            for number in self._plan.interleave.locate(chunk)[0].tolist():
                if limit is not None and self._yielded >= limit:
                    return
                try:
                    with stage(self.names[number]):
                        item = self._next(number)
                except _Ended:
                    return
                self._had[number] += 1
                self._yielded += 1
                yield (item, number) if self.tag else item

    def _limit(self) -> int | None:
        """How many samples this worker yields, if that is known beforehand."""
        stop = self._plan.stop
        if isinstance(stop, str):
            return None
        worker, world = distributed.worker(), distributed.current()
        number, total = world.rank * worker.total + worker.id, world.world_size * worker.total
        return stop // total + (number < stop % total)

    def _next(self, number: int) -> Any:
        iterator = self._iterators[number] or self._open(number)
        for item in iterator:
            return item
        self._turns[number] += 1
        if self._plan.stop == "first" or (self._plan.stop == "all" and all(self._turns)):
            raise _Ended
        if not self._had[number]:
            raise ConfigError(f"{self.names[number]} gave no sample at all: leave it out, or give it more shards")
        self._had[number] = 0
        for item in self._open(number):
            return item
        raise ConfigError(f"{self.names[number]} gave samples once and none when it began anew: it has to repeat")

    def _open(self, number: int) -> Iterator[Any]:
        source = self.sources[number]
        if hasattr(source, "set_epoch"):
            source.set_epoch(self._epoch + self._turns[number])
        iterator: Iterator[Any] = iter(source)
        self._iterators[number] = iterator
        return iterator

    # State.

    def _identity(self) -> State:
        return {
            "version": STATE_VERSION,
            "weights": list(self._plan.interleave.weights),
            "stop": self._plan.stop,
        }

    def _world(self) -> list[int]:
        return [*distributed.current(), *distributed.worker()]

    def state_dict(self) -> State:
        """Where this object is, in this process."""
        if self._resume is not None:
            return dict(self._resume)
        epoch, told = self._clock.peek()
        if self._epoch >= 0 and told == self._told:
            epoch = self._epoch
        return {
            **self._identity(),
            # Where nothing was yielded yet the state is that of any worker.
            "world": self._world() if self._yielded else None,
            "epoch": epoch,
            "yielded": self._yielded,
            "turns": list(self._turns),
            "had": list(self._had),
            "sources": [self._state_of(number) for number in range(len(self.sources))],
        }

    def _state_of(self, number: int) -> Any:
        for owner, name in ((self._iterators[number], "iterator"), (self.sources[number], "source")):
            if owner is not None and hasattr(owner, "state_dict") and hasattr(owner, "load_state_dict"):
                return {name: owner.state_dict()}
        return None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state at the next ``iter()``.

        Raises:
            StateError: it is of another mixture, or of another worker.
        """
        here = {} if isinstance(state, Mapping) and state.get("world", 0) is None else {"world": self._world()}
        check_state(state, {**self._identity(), **here}, of="Mixture")
        for name in ("epoch", "yielded"):
            read_int(state, name, of="Mixture")
        for name in ("turns", "had"):
            read_ints(state, name, len(self.sources), of="Mixture")
        own = state.get("sources")
        if not isinstance(own, list) or len(own) != len(self.sources) or not all(map(_is_own, own)):
            raise StateError(f"the state of this Mixture needs those of its {len(self.sources)} sources, got {own!r}")
        self._resume = dict(state)
        self._epoch, self._told = int(state["epoch"]), self._clock.peek()[1]

    def _restore(self, state: Mapping[str, Any]) -> None:
        self._yielded = int(state["yielded"])
        self._turns = [int(turns) for turns in state["turns"]]
        self._had = [int(had) for had in state["had"]]
        for number, own in enumerate(state["sources"]):
            if not self._had[number] and not self._turns[number]:
                continue  # not begun yet
            source = self.sources[number]
            if own is not None and "source" in own:
                if hasattr(source, "set_epoch"):
                    source.set_epoch(self._epoch + self._turns[number])
                source.load_state_dict(own["source"])
                self._iterators[number] = iter(source)
                continue
            iterator: Any = self._open(number)
            if own is not None:
                if not hasattr(iterator, "load_state_dict"):
                    raise StateError(
                        f"this state holds one of the iterator of {self.names[number]}, which has none: it is of other "
                        "sources"
                    )
                iterator.load_state_dict(own["iterator"])
                continue
            warnings.warn(
                f"{self.names[number]} has no state_dict: its first {self._had[number]} samples are read again and "
                "dropped, which is exact only if it repeats its order",
                stacklevel=3,
            )
            for had in range(self._had[number]):
                if next(iterator, _END) is _END:
                    raise StateError(
                        f"{self.names[number]} had given {self._had[number]} samples when this state was taken, and "
                        f"now it has {had}: it is another one"
                    )


def _is_own(state: Any) -> bool:
    """Whether this can be the state of a source, or of its iterator, or none."""
    return state is None or (isinstance(state, Mapping) and list(state) in (["source"], ["iterator"]))


class _Ended(Exception):
    """The mixture is at its end."""


def _size(source: Any) -> int | None:
    try:
        return len(source)
    except (TypeError, NotImplementedError):
        return None
