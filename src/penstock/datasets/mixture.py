"""`Mixture`: several data sets as one, in fixed proportions all through an epoch.

mixture = Mixture([(web, 0.7), (books, 0.2), (code, 0.1)], stop=1_000_000, seed=0)
loader = DataLoader(mixture, batch_size=256, num_workers=8)
for epoch in range(loader.epoch, 10):
    loader.set_epoch(epoch)
    for batch in loader: ...

Position p of an epoch belongs to one source and to one of its samples, both computed::

    p  ->  order of the mixture: source, its samples before p  ->  that source's own order  ->  its sample

Which source stands where is random (`penstock.order.mixture`), so every rank and batch sees each source by its weight.

Invariant: an epoch holds each source in its proportion, rounded, and a prefix of it to within `Mixture.bound` samples,
whatever the ranks and workers. All epochs have the same counts, and a source goes on in the next one where it stopped,
so all of its samples are had equally often.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Unpack, cast

import numpy as np
import xxhash
from torch.utils.data import IterableDataset

from penstock.datasets.mixing import SourceStatistics, make_proportions, split_sources
from penstock.datasets.mixture_stream import MixtureStream
from penstock.datasets.source_dataset import SourceDataset
from penstock.errors import ConfigError, PartitionError, StateError
from penstock.hashing import checked_seed, derive_key, mix
from penstock.order import SHUFFLES, Order, make_order
from penstock.order.mixture import MIXTURE_ORDER, BlockMixture
from penstock.order.permutation import Indices, normalise
from penstock.plan.cursor import State
from penstock.plan.share import MiniEpoch, SharePlan
from penstock.plan.share_options import DealOptions, check_share
from penstock.random import in_sample, sample_scope
from penstock.samplers.identity import fingerprint_of, shares_in
from penstock.samplers.orders import block_options
from penstock.sources.batched import BatchedDataset
from penstock.stages import stage
from penstock.wording import counted

__all__ = ["Mixture"]

_OPTIONS = DealOptions.__annotations__.keys() | {"shuffle", "block_size", "window"}


class Mixture(SourceDataset):
    """The samples of one rank, of several data sets in fixed proportions; a map-style data set of exactly that length.

    Args:
        sources: pairs ``(dataset, weight)``. Map-style data sets of the whole data, not of one rank's share: the
            mixture shares out itself. If they are all iterable-style, so is the result, see `MixtureStream`.
        mode: what the weights are. ``"proportion"``: parts of the mixture; ``"upsample"``: how often a sample of this
            source comes compared with one of another, so a part is weight times length; ``"repeat"``: how often an
            epoch goes through the source; ``"choose"``: how many of its samples an epoch has.
        stop: where an epoch of a proportion or upsample mixture ends. ``"first"``: before the first sample that would
            come twice by the proportions; ``"all"`` (default): as soon as by them every sample came at least once; or
            a number of samples. A source goes on in the next epoch where it stopped. Where it begins anew in the
            middle of one, samples may come twice in that epoch, with ``"first"`` too.
        shuffle: how each source is gone through: ``"global"``, ``"block"`` (with ``block_size`` and ``window``) or
            ``"none"``; another order each time.
        names: of the sources, for statistics and errors; by default ``source 0`` and so on.
        tag: items are ``(item, number of the source)``.
        rank, world_size, process_group, mini_epochs, seed, remainder: see `penstock.RankDataset`.

    Raises:
        ConfigError, PartitionError: arguments that make no sense, an empty source, one that is a rank's share.

    A state is a few integers, and fits another number of ranks. Loaders' statistics have the seconds of each source as
    a stage under its name; `statistics` has the samples. Memory: none a sample.
    """

    def __new__(cls, sources: Any = (), *args: Any, **options: Any) -> Mixture:
        """A stream over streams, else a map-style data set, as a subclass with a constructor of its own always is."""
        if cls.__init__ is not Mixture.__init__:
            return super().__new__(cls)
        if isinstance(sources, Iterator):  # which __init__ would find at its end
            raise ConfigError(f"a Mixture takes a list of pairs (dataset, weight), got a {type(sources).__name__}")
        sources = list(sources)
        streams = [isinstance(pair[0], IterableDataset) for pair in sources if isinstance(pair, tuple | list) and pair]
        if streams and all(streams):
            return cast(Mixture, MixtureStream(sources, **options))
        if any(streams):
            raise ConfigError("a Mixture takes map-style data sets or iterable ones, not both")
        return super().__new__(cls)

    def __init__(
        self,
        sources: Sequence[tuple[Any, Any]],
        *,
        mode: str = "proportion",
        stop: str | int | None = None,
        shuffle: str = "global",
        block_size: int | None = None,
        window: int | None = None,
        names: Sequence[str] | None = None,
        tag: bool = False,
        **deal: Unpack[DealOptions],
    ) -> None:
        order = {"shuffle": shuffle, "block_size": block_size, "window": window}
        check_share(type(self), {**order, **deal}, known=_OPTIONS)
        self._mix = _Mix(sources, mode, stop, shuffle, block_size, window, names, checked_seed(deal.get("seed", 0)))
        self.tag = tag
        super().__init__(self._mix, _MixturePlan(self._mix, shuffle="none", **deal))
        datasets = self._mix.datasets
        self.pure = not self.own_items and all(bool(getattr(dataset, "pure", False)) for dataset in datasets)
        self.releases_gil = all(bool(getattr(dataset, "releases_gil", False)) for dataset in datasets)
        self.channels_last = all(bool(getattr(dataset, "channels_last", False)) for dataset in datasets)
        self.fork_safe = all(bool(getattr(dataset, "fork_safe", True)) for dataset in datasets)

    def __getnewargs_ex__(self) -> tuple[tuple[Any], dict[str, Any]]:
        return ([],), {}

    @property
    def sources(self) -> list[Any]:
        """The data sets."""
        return list(self._mix.datasets)

    @property
    def bound(self) -> float:
        """No prefix of an epoch is off by this many samples of a source: about one for every two binary digits of the
        size of a block, see `penstock.order.mixture.BlockMixture`. At the epoch's end it is off by less than one."""
        return float(self._mix.order(0).bound)

    def __getitem__(self, index: int) -> Any:
        return Mixture.__getitems__(self, [index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The items at several indices at once."""
        return Mixture.load_samples(self, indices, None if in_sample() else self.keys(indices))

    def load_samples(
        self, indices: Sequence[int], keys: Sequence[int] | None, place: MiniEpoch | None = None
    ) -> list[Any]:
        """The items at several indices, each made in the scope of its key; at another `place` than the present one if
        that is given. Each source is asked for all of its own at once."""
        view = self.plan.view(place)
        numbers, rows = self._mix.source_of(view.rows(normalise(indices, len(view))))
        items: list[Any] = [None] * len(rows)
        for number in np.unique(numbers).tolist():
            places = np.flatnonzero(numbers == number)
            mine = None if keys is None else [keys[at] for at in places.tolist()]
            found = self._mix.load(number, rows[places].tolist(), mine)
            for at, item in zip(places.tolist(), found, strict=True):
                items[at] = (item, number) if self.tag else item
        return items

    def counts(self, position: int) -> dict[str, int]:
        """How many samples of each source are among the first ones of the present epoch, of all ranks together."""
        return dict(zip(self._mix.names, self._mix.order(self.epoch).counts(position), strict=True))

    def statistics(self, state: Mapping[str, Any] | None = None) -> list[SourceStatistics]:
        """Each source, and what the whole job has had of it.

        Args:
            state: of this mixture, or of a loader over it; without one, where the data set stands itself.

        Raises:
            StateError: the state is of something else.
        """
        found = _own_state(self.state_dict() if state is None else state, self.fingerprint)
        if found is None:
            raise StateError("this is no state of this Mixture, nor of a loader over it")
        return self._mix.statistics(int(found["epoch"]), int(found["consumed"]))


class _MixturePlan(SharePlan):
    """A share of an epoch whose order is a mixture's."""

    def make_order(self, place: MiniEpoch) -> Order:
        """Return the order of an epoch."""
        return _MixedOrder(self.source, place.epoch)

    def _order_in_words(self) -> str:
        return f"mixture, each source {self.source.shuffle}"

    def agrees_with(self, shuffle: bool | str) -> bool:
        """Return whether a loader asks for this order: a mixture is always one that is shuffled."""
        return shuffle is True or bool(self.source.shuffle == shuffle)


class _MixedOrder:
    """``order[positions]``: rows of the sources, one source after the other, at positions of one epoch."""

    def __init__(self, mix: _Mix, epoch: int) -> None:
        self._mix = mix
        self._epoch = epoch
        self._order = mix.order(epoch)

    def __len__(self) -> int:
        return len(self._mix)

    def __getitem__(self, positions: Any) -> Any:
        numbers, rows = self._mix.locate(self._order, self._epoch, np.asarray(positions))
        return rows + self._mix.starts[numbers]


class _Mix:
    """The sources one after the other, as the rows of one, and which of them is at a position of an epoch."""

    def __init__(
        self,
        sources: Any,
        mode: str,
        stop: str | int | None,
        shuffle: str,
        block_size: int | None,
        window: int | None,
        names: Sequence[str] | None,
        seed: int,
    ) -> None:
        self.datasets, weights = split_sources(sources)
        self.names = [f"source {i}" for i in range(len(self.datasets))] if names is None else list(names)
        if len(set(self.names)) != len(self.datasets):
            raise ConfigError(f"{len(self.datasets)} sources need as many different names, got {self.names}")
        for name, dataset in zip(self.names, self.datasets, strict=True):
            _check_source(name, dataset)
        self.sizes = [len(dataset) for dataset in self.datasets]
        self.starts = np.cumsum([0, *self.sizes[:-1]], dtype=np.int64)
        self.proportions = make_proportions(weights, self.sizes, mode, stop)
        self.per_epoch = self.proportions.per_epoch
        if shuffle not in SHUFFLES:
            raise ConfigError(f"unknown shuffle {shuffle!r}: use one of {', '.join(map(repr, SHUFFLES))}")
        self.shuffle, self._block = shuffle, block_options(shuffle, block_size, window)
        self._seed = seed
        self.fingerprint = self._identity()

    def __len__(self) -> int:
        return self.proportions.length

    def is_prefix_of_current(self, fingerprint: str, rows: int) -> bool:
        """Never."""
        return False

    def __repr__(self) -> str:
        return f"<{counted(len(self.datasets), 'source')}: {', '.join(map(str, self.names))}>"

    def source_of(self, rows: Indices) -> tuple[Indices, Indices]:
        """Return the source of each row, and its number in that."""
        numbers: Indices = self.starts.searchsorted(rows, "right") - 1
        return numbers, rows - self.starts[numbers]

    def records(self, rows: Indices) -> list[Any]:
        """Return the items of rows."""
        return [
            self._one(number, row) for number, row in zip(*map(np.ndarray.tolist, self.source_of(rows)), strict=True)
        ]

    def order(self, epoch: int) -> BlockMixture:
        """Which source stands at each position of an epoch."""
        return self.proportions.order(derive_key(self._seed, epoch, MIXTURE_ORDER), self.proportions.length)

    def locate(self, order: BlockMixture, epoch: int, positions: Indices) -> tuple[Indices, Indices]:
        """Return the source at each position of an epoch, and which of its samples."""
        numbers, ordinals = order.locate(positions)
        rows = np.empty_like(ordinals)
        for number in np.unique(numbers).tolist():
            mine = numbers == number
            # What earlier epochs had may be more than 64 bits, so it is added as a Python int.
            before, had = divmod(epoch * self.per_epoch[number], self.sizes[number])
            rounds, places = np.divmod(ordinals[mine] + had, self.sizes[number])
            chosen = np.empty_like(places)
            for turn in np.unique(rounds).tolist():
                here = rounds == turn
                chosen[here] = self._order(number, before + turn)[places[here]]
            rows[mine] = chosen
        return numbers, rows

    def _order(self, number: int, turn: int) -> Any:
        """The order in which a source is gone through for the ``turn``-th time."""
        return make_order(self.shuffle, self.sizes[number], seed=mix(self._seed, number), epoch=turn, **self._block)

    def load(self, number: int, rows: list[int], keys: Sequence[int] | None) -> list[Any]:
        """Some items of a source."""
        dataset = self.datasets[number]
        with stage(self.names[number]):
            if isinstance(dataset, BatchedDataset) and dataset.load_samples is not None:  # type: ignore[attr-defined]
                return list(dataset.load_samples(rows, keys))  # type: ignore[attr-defined]
            if keys is None:
                return [self._one(number, row) for row in rows]
            items = []
            with sample_scope(0) as scope:
                for row, key in zip(rows, keys, strict=True):
                    scope.move(key)
                    items.append(self._one(number, row))
            return items

    def _one(self, number: int, row: int) -> Any:
        try:
            return self.datasets[number][row]
        except Exception as error:
            error.add_note(f"while loading sample {row} of {self.names[number]}")
            raise

    def statistics(self, epoch: int, consumed: int) -> list[SourceStatistics]:
        """See `Mixture.statistics`."""
        weights = self.proportions.weights
        rows = zip(self.names, self.sizes, weights, self.per_epoch, self.order(epoch).counts(consumed), strict=True)
        found = []
        for name, size, weight, per_epoch, count in rows:
            had = epoch * per_epoch + count
            found.append(SourceStatistics(name, size, weight / sum(weights), per_epoch, had, had / size))
        return found

    def _identity(self) -> str:
        identity = {
            "sources": [
                [size, fingerprint_of(dataset)] for size, dataset in zip(self.sizes, self.datasets, strict=True)
            ],
            "order": MIXTURE_ORDER,
            "weights": self.proportions.weights,
            "length": self.proportions.length,
            "shuffle": self.shuffle,
            **self._block,
        }
        return xxhash.xxh3_128_hexdigest(json.dumps(identity, sort_keys=True).encode())


def _check_source(name: str, dataset: Any) -> None:
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise ConfigError(f"{name} is a {type(dataset).__name__}, and a Mixture takes data sets with length and items")
    share = next((share for share in shares_in(dataset) if getattr(share, "world_size", 1) != 1), None)
    if share is not None:
        raise PartitionError(
            f"{name} is one rank's share of a {type(share).__name__}, and the Mixture shares out itself: give it the "
            "whole, with rank=0, world_size=1, or what is below it (a Manifest's images, an MDSFolder)"
        )


def _own_state(state: Any, fingerprint: str) -> State | None:
    """The data set's part of a state, which a loader's state has somewhere inside."""
    if not isinstance(state, Mapping):
        return None
    if state.get("fingerprint") == fingerprint and "consumed" in state and "epoch" in state:
        return dict(state)
    return next((own for value in state.values() if (own := _own_state(value, fingerprint)) is not None), None)
