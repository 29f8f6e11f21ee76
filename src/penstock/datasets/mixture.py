"""`Mixture`: several datasets as one, with a weight for each; weights are constant or follow a schedule.

mixture = Mixture([(web, 0.7), (books, 0.2), (code, 0.1)], stop=1_000_000, seed=0)
loader = DataLoader(mixture, batch_size=256, num_workers=8)
for epoch in range(loader.epoch, 10):
    loader.set_epoch(epoch)
    for batch in loader: ...

Each position p of an epoch belongs to one sample of one source; both are computed::

    p  ->  order of the mixture: source, number of its samples before p  ->  the source's own order  ->  sample

The order of the sources is random (`penstock.order.mixture`), so every rank and every batch sees each source in
proportion to its weight.

Invariant: an epoch contains each source in its proportion, rounded, and any prefix of it to within `Mixture.bound`
samples, for any ranks and workers. In the next epoch a source continues where it stopped, so all of its samples occur
equally often.
"""

from __future__ import annotations

import contextlib
import operator
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Unpack, cast

import xxhash
from torch.utils.data import IterableDataset

from penstock.datasets.lengths import last_filter
from penstock.datasets.mixed_rows import MixedOrder, MixedRows
from penstock.datasets.mixing import (
    SourceStatistics,
    make_proportions,
    read_names,
    read_schedule,
    read_weights,
    split_sources,
    whole_numbers,
)
from penstock.datasets.mixture_stream import MixtureStream
from penstock.datasets.rows import check_source, excluded_rows, row_count
from penstock.datasets.source_dataset import EpochVaryingDataset, SourceDataset
from penstock.datasets.subset import filter_rows, filtered_parts
from penstock.errors import ConfigError, StateError
from penstock.hashing import checked_seed
from penstock.order import SHUFFLES, Order
from penstock.order.mixture import MIXTURE_VERSION, WeightStage, boundary
from penstock.order.permutation import Indices
from penstock.order.shuffle import block_options
from penstock.plan.cursor import STATE_ENTRY, Cursor, State, unpack
from penstock.plan.reader import Draws
from penstock.plan.share import EpochView, MiniEpoch, ShareCursor, ShareEpoch, SharePlan
from penstock.plan.share_options import PartitionOptions, check_share
from penstock.random import in_sample
from penstock.wording import kind_text

if TYPE_CHECKING:
    from penstock.plan.exclusion import ExclusionMark

__all__ = ["Mixture"]

_OPTIONS = PartitionOptions.__annotations__.keys() | {"shuffle", "block_size", "window"}


class Mixture(SourceDataset):
    """A mixture of several datasets with weights. A map-style dataset of one rank's samples.

    Args:
        sources: pairs ``(dataset, weight)``; with a schedule that begins at 0, datasets alone. Give map-style datasets
            of all data, not of one rank's samples. If all sources are iterable-style, so is the result, see
            `MixtureStream`. A source with weight 0 is not used until a later weight turns it on.
        mode: the meaning of the weights. ``"proportion"``: fractions of the mixture. ``"repeat"``: number of passes
            through the source in an epoch. ``"choose"``: number of the source's samples in an epoch.
        stop: the end of an epoch in the mode "proportion". ``"first"``: before any sample would repeat. ``"all"``
            (default): as soon as every sample has occurred. Or a number of samples. In the next epoch a source
            continues where it stopped. If it wraps around in the middle of an epoch, samples may occur twice in that
            epoch, even with ``"first"``.
        schedule: pairs ``(position, weights)``. From this sample of the job on (counted over all epochs and ranks),
            these weights apply: a number for each source, or a dict by name; 0 turns a source off. Needs ``stop=`` as a
            number of samples.
        shuffle: the order of each source: ``"global"``, ``"block"`` (with ``block_size`` and ``window``) or ``"none"``;
            reshuffled in each pass.
        names: names of the sources, for statistics, weights by name, and errors; by default ``source 0`` and so on.
        tag: items are ``(item, number of the source)``.
        exclude: rows to leave out: a dict from source names to row numbers, or a list with an entry for each source
            (None for none); at most 100,000 per source. For packs, rows of documents. Other rows of the same source
            replace them, see `penstock.RankDataset`. Rows that a source itself excludes are excluded here too.
        rank, world_size, process_group, mesh, mini_epochs, seed, remainder: see `penstock.RankDataset`.

    Raises:
        ConfigError, PartitionError: invalid arguments, an empty source, or a source with one rank's samples only.

    A state has a few integers and can be loaded on another number of ranks. A loader's statistics show the seconds of
    each source as a stage with its name; `statistics` returns the samples. It uses no memory per sample.

    >>> data = Mixture([range(9), range(9)], schedule=[(0, [1, 0]), (4, [1, 3])], stop=8, shuffle="none", tag=True,
    ...                rank=0, world_size=1)
    >>> [source for _, source in data][:4], data.counts(8)
    ([0, 0, 0, 0], {'source 0': 5, 'source 1': 3})
    """

    def __new__(cls, sources: Any = (), *args: Any, **options: Any) -> Mixture:
        """Return a `MixtureStream` for iterable-style sources, else a map-style dataset.

        A subclass with its own constructor is always map-style.
        """
        if cls.__init__ is not Mixture.__init__:
            return super().__new__(cls)
        # Reading an iterator here would leave it empty for __init__.
        if isinstance(sources, Iterator):
            raise ConfigError(f"a Mixture takes a list of pairs (dataset, weight), got {kind_text(sources)}")
        sources = list(sources)
        streams = [isinstance(_dataset_of(entry), IterableDataset) for entry in sources]
        if streams and all(streams):
            if options.pop("schedule", None) is not None:
                raise ConfigError("schedule= needs map-style datasets: streams have no position in the job")
            return cast(Mixture, MixtureStream(sources, **options))
        if any(streams):
            raise ConfigError("a Mixture takes map-style datasets or iterable-style ones, not both")
        return super().__new__(cls)

    def __init__(
        self,
        sources: Sequence[Any],
        *,
        mode: str = "proportion",
        stop: str | int | None = None,
        schedule: Sequence[tuple[int, Any]] | None = None,
        shuffle: str = "global",
        block_size: int | None = None,
        window: int | None = None,
        names: Sequence[str] | None = None,
        tag: bool = False,
        exclude: Mapping[str, Any] | Sequence[Any] | None = None,
        **deal: Unpack[PartitionOptions],
    ) -> None:
        order = {"shuffle": shuffle, "block_size": block_size, "window": window}
        check_share(type(self), {**order, **deal}, known=_OPTIONS)
        if shuffle not in SHUFFLES:
            raise ConfigError(f"unknown shuffle {shuffle!r}: use one of {', '.join(map(repr, SHUFFLES))}")
        block = block_options(shuffle, block_size, window)
        self._options: dict[str, Any] = {"names": names, "tag": tag, **order, **deal}
        self._mode, self._stop = mode, stop
        datasets, self._weights, self._schedule, names = _read_sources(sources, schedule, names, mode, stop)
        for name, dataset in zip(names, datasets, strict=True):
            check_source(name, dataset, "a Mixture")
        excluded = []
        for number, (name, rows) in enumerate(zip(names, _exclusions_by_source(exclude, names), strict=True)):
            with _prefix_errors(name):
                if rows is not None and isinstance(datasets[number], EpochVaryingDataset):
                    # The documents in a pack change with each pass, so packs exclude documents themselves.
                    datasets[number], rows = datasets[number].excluding(rows), None
                excluded.append(excluded_rows(datasets[number], rows))
        proportions = make_proportions(self._weights, list(map(row_count, datasets)), mode, stop)
        later = (WeightStage(begin, whole_numbers(weights)) for begin, weights in self._schedule)
        stages = (WeightStage(0, proportions.weights), *later)
        seed = checked_seed(deal.get("seed", 0))
        self._rows = MixedRows(datasets, names, proportions, stages, shuffle, block, seed, excluded)
        self.tag = tag
        plan = _MixturePlan(self._rows, **deal)
        super().__init__(self._rows, plan)
        self._plan = plan
        self.pure = not self.own_items and all(bool(getattr(dataset, "pure", False)) for dataset in datasets)
        self.releases_gil = all(bool(getattr(dataset, "releases_gil", False)) for dataset in datasets)
        self.channels_last = all(bool(getattr(dataset, "channels_last", False)) for dataset in datasets)
        self.fork_safe = all(bool(getattr(dataset, "fork_safe", True)) for dataset in datasets)

    def __getnewargs_ex__(self) -> tuple[tuple[Any], dict[str, Any]]:
        return ([],), {}

    @property
    def sources(self) -> list[Any]:
        """The datasets in the mixture."""
        return list(self._rows.datasets)

    @property
    def bound(self) -> float:
        """The largest deviation, in samples of one source, from its exact proportion in any prefix of an epoch.

        At the end of an epoch, or of a stage of its schedule, the deviation is below one sample.
        """
        return float(self._rows.order(0).mixture.bound)

    # Items.

    def __getitem__(self, index: int) -> Any:
        return Mixture.__getitems__(self, [index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return Mixture.load_samples(self, indices, None if in_sample() else self.keys(indices))

    def load_samples(
        self, indices: Sequence[int], keys: Sequence[int] | None, place: MiniEpoch | None = None
    ) -> list[Any]:
        """Return the items at several indices. Each source loads all of its items in one call."""
        view = self.plan.view(place)
        positions = view.positions_of(view.local(indices)) % max(1, view.partition.n)
        turns = list(cast(MixedOrder, view.order).turns(positions))
        items = self._rows.load(turns, keys)
        if self.tag:
            for number, _, places, _ in turns:
                for at in places.tolist():
                    items[at] = items[at], number
        return items

    # Weights that change.

    def set_weights(self, weights: Any, *, at: int) -> int:
        """Change the weights from a sample of the job on, until the next weights of the schedule.

        Args:
            weights: a number for each source, or a dict by name; 0 turns a source off.
            at: the first sample that the weights may apply to, counted over all epochs and ranks. They apply from there
                or from the next block boundary, so that nothing before it changes, bit for bit.

        Returns:
            The position from which the weights apply.

        Raises:
            ConfigError: invalid weights; a mixture of counted samples (``mode="repeat"``, ``"choose"``); or a position
                that a loader of this process has already planned; the message names the first possible position.

        Call it on every rank with the same arguments, at a position that no rank has planned: loaders plan up to 32,768
        samples of a rank ahead of the batches that they deliver. Running Penstock loaders apply the change; workers of
        other loaders keep the weights with which they were started. A state contains the change: 24 bytes, and the
        weights.
        """
        if self._mode != "proportion":
            raise ConfigError(
                f"the weights of mode={self._mode!r} cannot change: they are counts of samples, and their sum is the "
                "length of an epoch"
            )
        whole = whole_numbers(read_weights(weights, self._rows.names))
        self._rows.check_weights(whole)
        if isinstance(at, bool) or not hasattr(at, "__index__") or operator.index(at) < 0:
            raise ConfigError(f"at= takes a sample of the job, an integer of 0 or more, got {at!r}")
        at = operator.index(at)
        length, stages = len(self._rows), self._rows.stages_with(self._plan.changes)
        begin = boundary(stages, length, at)
        least = self._plan.planned
        if begin < least:
            raise ConfigError(
                f"weights cannot change at sample {at} of the job: rank {self.rank} has planned samples up to {least}. "
                f"The first possible position is {boundary(stages, length, least)}; choose a later one, because other "
                "ranks may have planned more"
            )
        self._plan.changes = (*self._plan.changes, WeightStage(begin, whole))
        return begin

    def counts(self, position: int) -> dict[str, int]:
        """Return the number of samples of each source among the first ``position`` samples of the current epoch, over
        all ranks.
        """
        mixture = self._rows.order(self.epoch, self._plan.changes).mixture
        return dict(zip(self._rows.names, mixture.counts(position), strict=True))

    def statistics(self, state: Mapping[str, Any] | None = None) -> list[SourceStatistics]:
        """Return the samples and passes of each source, for the whole job so far.

        Args:
            state: of this mixture, or of a loader over it; by default the dataset's own state.

        Raises:
            StateError: the state belongs to something else.
        """
        found = _find_state(self.state_dict() if state is None else state, self.fingerprint)
        if found is None:
            raise StateError("this is not a state of this Mixture, nor of a loader over it")
        changes = self._plan.read_changes(found)
        return self._rows.statistics(int(found["epoch"]), int(found["consumed"]), changes)

    # Filters.

    @property
    def filter_rows(self) -> int:
        return sum(map(filter_rows, self._rows.datasets))

    def filtered(self, keep: Any) -> Mixture:
        """Return the mixture of the filtered sources, see `penstock.Subset`. Rows are numbered over the
        concatenated sources.
        """
        parts = filtered_parts(keep, self._rows.datasets)
        exclude = [
            None if rows is None else rows.among(last_filter(part)).rows
            for part, rows in zip(parts, self._rows.excluded, strict=True)
        ]
        return self._copy_with(parts, self._weights, self._stop, self._schedule, exclude)

    def excluded_by_source(self, exclude: Mapping[str, Any] | Sequence[Any] | None = None) -> list[Any]:
        """Return the excluded rows of each source plus those in ``exclude``; None for a source without any."""
        found: list[Any] = []
        names = self._rows.names
        sources = zip(names, self.sources, self._rows.excluded, _exclusions_by_source(exclude, names), strict=True)
        for name, dataset, rows, further in sources:
            if further is not None:
                with _prefix_errors(name):
                    rows = excluded_rows(dataset, further) if rows is None else rows.with_rows(further)
            found.append(None if rows is None else rows.rows)
        return found

    def rescaled(self, datasets: Sequence[Any], ratios: Sequence[Fraction]) -> Mixture:
        """Return a mixture of other datasets, in which each sample of a source has become ``ratio`` samples.

        Weights, the length of an epoch and the schedule are rescaled: each source keeps its fraction of the samples.
        """
        if self._mode == "repeat":
            return self._copy_with(datasets, self._weights, self._stop, [])
        if self._mode == "choose":
            pairs = zip(self._weights, ratios, strict=True)
            weights = [Fraction(max(1, round(weight * ratio)) if weight else 0) for weight, ratio in pairs]
            return self._copy_with(datasets, weights, self._stop, [])
        stages = [(0, self._weights), *self._schedule]
        new: list[list[Fraction]] = [[w * r for w, r in zip(of, ratios, strict=True)] for _, of in stages]
        scales = [sum(scaled) / Fraction(sum(of)) for scaled, (_, of) in zip(new, stages, strict=True)]
        ends = [*(begin for begin, _ in stages[1:]), None]

        def rescaled(position: int) -> int:
            lasts = (position if end is None else min(position, end) for end in ends)
            parts = zip(scales, stages, lasts, strict=True)
            return round(sum((scale * max(0, last - begin) for scale, (begin, _), last in parts), Fraction(0)))

        # If several weights now begin at one position, the last ones apply: the earlier ones span less than a sample.
        begins = {rescaled(begin): scaled for (begin, _), scaled in zip(stages, new, strict=True)}
        first, *later = begins.items()
        stop = self._stop if isinstance(self._stop, str | None) else max(1, rescaled(self._stop))
        return self._copy_with(datasets, first[1], stop, later)

    def _copy_with(
        self,
        datasets: Sequence[Any],
        weights: Sequence[Fraction],
        stop: Any,
        schedule: Any,
        exclude: Sequence[Any] | None = None,
    ) -> Mixture:
        if self._plan.changes:
            raise ConfigError("this mixture's weights were changed by set_weights: filter or pack it before that call")
        pairs = list(zip(datasets, weights, strict=True))
        options = {**self._options, "exclude": exclude}
        return Mixture(pairs, mode=self._mode, stop=stop, schedule=schedule or None, **options)


class _MixtureEpoch(ShareEpoch):
    """An epoch of a mixture, whose weights may change while it is read."""

    _plan: _MixturePlan

    def __init__(self, plan: _MixturePlan, view: EpochView) -> None:
        super().__init__(plan, view)
        self._changes = view.place.changes
        self.planned = 0
        """How many positions, counted from the start of the epoch, have been requested so far."""
        plan.runs.add(self)

    @property
    def place(self) -> MiniEpoch:
        # Another reader may load a state with other changes. This must not undo changes here.
        self._changes = self._plan.newest(self._changes)
        return self.view.place._replace(changes=self._changes)

    def block(self, start: int, stop: int) -> tuple[Indices, Indices]:
        indices, positions = super().block(start, stop)
        if len(positions):
            self.planned = max(self.planned, int(positions[-1]) + 1)
        return indices, positions


class _MixturePlan(SharePlan):
    """A `SharePlan` whose epochs have the order of a mixture."""

    def __init__(self, rows: MixedRows, **deal: Unpack[PartitionOptions]) -> None:
        self.changes: tuple[WeightStage, ...] = ()
        """Changes of the weights, in the order in which they were made."""
        self.runs: weakref.WeakSet[_MixtureEpoch] = weakref.WeakSet()
        """Epochs of readers in this process."""
        super().__init__(rows, shuffle="none", **deal)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "runs"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, runs=weakref.WeakSet())

    def newest(self, changes: tuple[WeightStage, ...]) -> tuple[WeightStage, ...]:
        """Return the changes of this plan if they continue others, else these others."""
        return self.changes if self.changes[: len(changes)] == changes else changes

    @property
    def planned(self) -> int:
        """How many positions, counted from the start, readers of this process have consumed or prefetched."""
        place, view = self.shown, self.view()
        begin = view.partition.end if place.skip >= len(view.partition) else view.partition.begin
        least = place.epoch * place.samples + min(begin + place.skip * view.partition.world_size, place.samples)
        return max([least, *(run.epoch * place.samples + min(run.planned, place.samples) for run in self.runs)])

    @property
    def shown(self) -> MiniEpoch:
        return super().shown._replace(changes=self.changes)

    def bind(self, cursor: Cursor, draws: Draws) -> ShareEpoch:
        return _MixtureEpoch(self, super().bind(cursor, draws).view)

    def show(self, cursor: Cursor, *, loaded: bool, running: bool) -> None:
        if loaded and isinstance(cursor, ShareCursor):
            self.changes = cursor.place.changes
        super().show(cursor, loaded=loaded, running=running)

    def _place(self, cursor: Cursor) -> MiniEpoch:
        place = super()._place(cursor)
        return place._replace(changes=self.newest(place.changes))

    def make_order(self, place: MiniEpoch) -> Order:
        return cast(Order, self.source.order(place.epoch, place.changes))

    def identity(self) -> State:
        return {**super().identity(), "order_version": MIXTURE_VERSION}

    def _order_in_words(self) -> str:
        return f"mixture, each source {self.source.shuffle}"

    def agrees_with(self, shuffle: bool | str) -> bool:
        # True fits, because a mixture is always shuffled.
        return shuffle is True or bool(self.source.shuffle == shuffle)

    @property
    def excluded_mark(self) -> ExclusionMark | None:
        marks: list[ExclusionMark | None] = self.source.excluded_marks()
        digests = [mark and mark[1] for mark in marks]
        count = sum(mark[0] for mark in marks if mark)
        return (count, xxhash.xxh3_64_hexdigest(repr(digests).encode())) if count else None

    def write_changes(self, changes: tuple[WeightStage, ...]) -> State:
        weights = [[begin, self._hash(weights), *weights] for begin, weights in changes]
        return super().write_changes(changes) | ({"weights": weights} if weights else {})

    def read(self, state: Mapping[str, Any], *, allow_growth: bool = False) -> ShareCursor:
        cursor = super().read(state, allow_growth=allow_growth)
        return replace(cursor, place=cursor.place._replace(changes=self.read_changes(state)))

    def read_changes(self, state: Mapping[str, Any]) -> tuple[WeightStage, ...]:
        """Return the changes of weights in a state.

        Raises:
            StateError: they are damaged, or belong to other sources.
        """
        changes = []
        for entry in state.get("weights", ()):
            if not isinstance(entry, list | tuple) or len(entry) < 3 or not all(isinstance(n, int) for n in entry[2:]):
                raise StateError(f"this state is damaged: {entry!r} is not a change of weights")
            begin, identity, *weights = entry
            if len(weights) > len(self.source.sizes) or self._hash(weights) != identity:
                raise StateError(
                    f"this state has weights for {len(weights)} sources from sample {begin} of the job on, but this "
                    f"mixture has {len(self.source.sizes)} other sources: resume with the same sources in the same "
                    "order"
                )
            missing = len(self.source.sizes) - len(weights)
            changes.append(WeightStage(int(begin), (*weights, *[0] * missing)))
        return tuple(changes)

    def _hash(self, weights: Sequence[int]) -> str:
        """Return a hash of the sources that the weights are for."""
        return xxhash.xxh3_64_hexdigest(repr(self.source.identities()[: len(weights)]).encode())


def _dataset_of(entry: Any) -> Any:
    """Return the dataset of a pair, or an entry without weight itself."""
    return entry[0] if isinstance(entry, tuple | list) and entry else entry


def _read_sources(
    sources: Any, schedule: Any, names: Sequence[str] | None, mode: str, stop: Any
) -> tuple[list[Any], list[Fraction], list[tuple[int, list[Fraction]]], list[str]]:
    """Return the datasets, their initial weights, the later weights of the schedule, and the names."""
    entries = list(sources)
    names = read_names(names, len(entries))
    later = read_schedule(schedule or [], names)
    if later and (mode != "proportion" or isinstance(stop, str | None)):
        raise ConfigError(
            "a schedule needs mode='proportion', and stop= as the number of samples in an epoch, got "
            f"mode={mode!r} and stop={stop!r}"
        )
    if not later or later[0][0] > 0:
        datasets, weights = split_sources(entries, least=0)
        return datasets, weights, later, names
    if any(isinstance(entry, tuple) and len(entry) == 2 for entry in entries):
        raise ConfigError(
            "the schedule begins at 0, so give the sources without weights: Mixture([web, books], schedule=...)"
        )
    return entries, later[0][1], later[1:], names


@contextlib.contextmanager
def _prefix_errors(source: str) -> Iterator[None]:
    """Prefix errors about excluded rows with the name of the source."""
    try:
        yield
    except (ConfigError, IndexError) as error:
        raise type(error)(f"{source}: {error}") from error


def _exclusions_by_source(exclude: Any, names: Sequence[str]) -> list[Any]:
    """Return the excluded rows of each source; None for none.

    Raises:
        ConfigError: rows of an unknown source, or not one entry for each source.
    """
    if exclude is None:
        return [None] * len(names)
    if isinstance(exclude, Mapping):
        unknown = [name for name in exclude if name not in names]
        if unknown:
            raise ConfigError(f"exclude= has rows of {unknown[0]!r}, but this mixture's sources are {list(names)}")
        return [exclude.get(name) for name in names]
    entries = list(exclude) if isinstance(exclude, list | tuple) else []
    if len(entries) != len(names) or any(isinstance(entry, int) for entry in entries):
        raise ConfigError(
            f"exclude= of a mixture takes a dict from source names to rows, or a list with an entry for each of the "
            f"{len(names)} sources, got {exclude!r}"
        )
    return entries


def _find_state(state: Any, fingerprint: str) -> State | None:
    """Return the dataset's part of a state, which may be nested in a loader's state; None if there is none."""
    if not isinstance(state, Mapping):
        return None
    if STATE_ENTRY in state:
        state = unpack(state, of="Mixture")
    if state.get("fingerprint") == fingerprint and "consumed" in state and "epoch" in state:
        return dict(state)
    return next((own for value in state.values() if (own := _find_state(value, fingerprint)) is not None), None)
