"""`GroupedBatchSampler`: batches of one group each, formed for the whole job and then split among the ranks.

    order="class"                 batches of the groups' samples, computed (`penstock.plan.class_plan`)
    order="completion", "first"   batches formed from the indices of the sampler, from the start of the epoch on

Invariant: every index of the sampler, repeats included, is in exactly one batch, except for dropped partial batches.
The numbering does not depend on the number of ranks, and not on where the indices were cut into chunks.
"""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
import xxhash

from penstock import distributed
from penstock.errors import SamplerError, StateError
from penstock.order import ORDER_VERSION, Partition
from penstock.order.classes import ClassBatches
from penstock.order.permutation import Indices
from penstock.plan.class_plan import ClassBatchPlan
from penstock.plan.cursor import Cursor, State
from penstock.plan.epoch import Batch, BatchEpochPlan, EpochPlan, PartitionedOrder
from penstock.plan.exclusion import ExcludedRows, check_excluded
from penstock.plan.reader import Draws, OuterPlan
from penstock.samplers.base import EpochBatchSampler, EpochSampler, RankMixin
from penstock.samplers.distributed import DistributedSampler
from penstock.samplers.draws import DrawingSampler
from penstock.samplers.identity import fingerprint_identity, holds_a_share
from penstock.samplers.infinite import InfiniteSampler
from penstock.samplers.lengths import check_integers, check_sizes
from penstock.samplers.orders import flag, positive
from penstock.samplers.random import RandomSampler
from penstock.storage.class_index import ClassIndex
from penstock.wording import kind_text

if TYPE_CHECKING:
    from penstock.images.sizes import Sizes

__all__ = ["GroupedBatchSampler", "Groups", "form_batches", "group_ids_of"]

_CHUNK = 1 << 16
_FIRST_CHUNK = 4096
"""Indices in the first chunk, few so that the first batch is ready at once."""
_LARGEST_BLOCK = 1 << 11
"""Batches in a block. Lists of very many more would trigger Python's garbage collector repeatedly."""
_ORDERS = ("completion", "first", "class")


class GroupedBatchSampler(RankMixin, OuterPlan[BatchEpochPlan], EpochBatchSampler):
    """Batches whose samples all belong to one group, such as images of one orientation.

    Args:
        sampler: a sampler of Penstock. From a `DistributedSampler` this takes the global order, epoch, seed, world
            size, rank and ``remainder``. Any other one yields the indices of the whole job, and must be the same on all
            ranks. For a sampler of torch pass Penstock's of the same name, which yields the same indices.
        group_ids: one integer per sample of the dataset, or a `penstock.images.sizes.Sizes` or the path of its file
            (two groups: wider than high, and the others).
        batch_size: positive.
        drop_uneven: maskrcnn-benchmark's name for ``drop_last``, at its position among the arguments.
        drop_last: leave out batches that are not full, and the last full batches that do not divide among the ranks.
        order: ``"completion"``: yield a batch as soon as it is full, and partial batches at the end; memory is one
            chunk plus groups x batch_size. ``"first"``: in the order of their first members, as in maskrcnn-benchmark;
            an earlier batch may be filled by the last index, so this holds the whole stream (about 40 bytes per index,
            and at least 8 x groups x batch_size bytes). ``"class"``: in random order, computed: each epoch permutes the
            samples of every group, and all batches. This needs a Penstock sampler with ``shuffle="global"``, whose seed
            and ranks it takes. A resume begins at once.
        exclude: with ``order="class"``, samples to leave out, at most 100,000. Another sample of the same group
            replaces each, drawn from (seed, epoch, sample). If a whole group is excluded, its batches are filled with
            samples of the next group that has any left, or of the last such group. All other samples keep their
            positions, so older states still load. To load a state saved with excluded samples, exclude at least the
            same ones.
        world_size, rank, process_group, mesh: for other samplers, as for `DistributedSampler`. With ``world_size=1``
            all batches belong to this rank.

    Raises:
        SamplerError: a sample has no group, the sampler is not Penstock's or its dataset is one rank's share, arguments
            contradict each other, the batch size is not a positive integer, or drop_last is not a bool.
        StateError: the sizes were measured from another manifest than the sampler's.
        PartitionError: the rank is outside the world, or (at use) a process group made later disagrees.
        ConfigError, IndexError: a sample to exclude does not exist, or all samples are excluded.

    **Ranks.** Batches are numbered over the whole job, and batch g goes to rank ``g % world_size``. All ranks have
    the same number: the first batches of the epoch are repeated (`repeated` lists them), or with ``drop_last`` the last
    ones are left out. With a sampler of ``remainder="uneven"`` ranks differ by at most one batch. Apart from these,
    every index of the stream is in exactly one batch.

    **Length.** ``len`` is always exact. Over a permutation it costs one pass over ``group_ids`` (one byte per sample, 1
    ms per million). If indices repeat, the stream is counted once per epoch.

    **State.** The number of batches that the job has consumed, and the state of the sampler at the start of the epoch.
    It is elastic in the number of ranks. On a resume every rank forms all batches again from the start of the epoch, at
    about 10 million indices per second; with ``order="class"`` this costs nothing.

    >>> from penstock.samplers import SequentialSampler
    >>> batches = GroupedBatchSampler(SequentialSampler(range(7)), [0, 1, 0, 1, 0, 0, 1], 2, world_size=1, rank=0)
    >>> list(batches), len(batches)
    ([[0, 2], [1, 3], [4, 5], [6]], 4)
    """

    def __init__(
        self,
        sampler: Iterable[Any],
        group_ids: npt.ArrayLike | Sizes | str | os.PathLike[str],
        batch_size: int,
        drop_uneven: bool = False,
        *,
        drop_last: bool = False,
        order: str = "completion",
        exclude: npt.ArrayLike | None = None,
        world_size: int | None = None,
        rank: int | None = None,
        process_group: dist.ProcessGroup | None = None,
        mesh: dist.device_mesh.DeviceMesh | None = None,
    ) -> None:
        super().__init__()
        self.sampler = _checked_sampler(sampler, order)
        self.batch_size = positive("batch_size", batch_size)
        self.drop_last = self.drop_uneven = flag("drop_last", drop_uneven or drop_last)
        self.order = order
        if isinstance(sampler, DistributedSampler):
            if any(one is not None for one in (world_size, rank, process_group, mesh)):
                raise SamplerError("world_size and rank come from the DistributedSampler: leave them out")
            self._world = sampler._world
            self.remainder = "drop" if self.drop_last else sampler.remainder
        else:
            rank = 0 if world_size == 1 and rank is None else rank
            self._world = distributed.LateWorld(
                rank, world_size, process_group=process_group, mesh=mesh, of="GroupedBatchSampler"
            )
            self.remainder = "drop" if self.drop_last else "pad"
        data = _data_of(sampler)
        self.groups = Groups(group_ids_of(group_ids, data=data))
        self.group_ids = self.groups.ids
        """The group of every sample, numbered from 0."""
        if data is not None and len(data) != len(self.groups):
            raise SamplerError(
                f"group_ids has {len(self.groups)} entries for a dataset of {len(data)} samples: pass one for each"
            )
        self._counted: tuple[Cursor, Indices] | None = None
        if order == "class":
            self._excluded = ExcludedRows.by_class(exclude, self.groups, self.groups.starts)
        elif exclude is not None:
            raise SamplerError(f"exclude= replaces samples by arithmetic: use order='class', not order={order!r}")

    @property
    def repeated(self) -> list[int]:
        """Numbers of the batches that are repeated at the end of the current epoch, so that all ranks have equally
        many.
        """
        run = self._reader.peek()
        assert isinstance(run, _Formed | ClassBatchPlan)
        numbers: list[int] = run.partition.repeated.tolist()
        return numbers

    # As a plan.

    @property
    def inner(self) -> EpochSampler:
        """The sampler. Its bookmark is also where readers of the batches begin next."""
        return self.sampler

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a state at the next ``iter()``, on any number of ranks.

        Raises:
            StateError: the state belongs to other data, groups or batches.
        """
        super().load_state_dict(state)
        cursor = self.bookmark.cursor
        assert cursor.sampler is not None
        # A reader of the sampler alone begins at the start of the epoch.
        self.bookmark.cursor = replace(cursor.sampler, sampler=cursor)

    def chosen(self, cursor: Cursor) -> None:
        """Pass on a cursor that the user of a reader chose."""
        if cursor.sampler is not None:
            self.inner.chosen(cursor.sampler)

    def bind(self, cursor: Cursor, draws: Draws) -> BatchEpochPlan:
        """Return this rank's batches of the cursor's epoch, from the cursor on."""
        rank, world_size = self._world.get()
        sampler = self.sampler
        drawing = isinstance(sampler, DrawingSampler) and sampler.generator is None
        if world_size > 1 and drawing and getattr(sampler, "seed", None) is None:
            raise SamplerError(
                f"each of the {world_size} ranks would draw a different order from this {type(sampler).__name__}, "
                "and samples would be lost and repeated: use penstock.DistributedSampler, or pass the sampler a seed=, "
                "or a generator with the same seed on all ranks"
            )
        if cursor.unit == "sample":
            # Of the bookmark: a state of these batches was loaded, or the sampler was set to an epoch or a state.
            cursor = cursor.sampler or Cursor(epoch=cursor.epoch, sampler=cursor)
        assert cursor.sampler is not None
        inside = self.sampler.bind(cursor.sampler, draws)
        if self.order != "class":
            return _Formed(self, inside, cursor.consumed)
        inner = inside.cursor(0)
        if inner.consumed:
            raise StateError(
                f"the state loaded into the {type(self.sampler).__name__} is from the middle of an epoch, but "
                "order='class' makes the batches of whole epochs: load the state of this GroupedBatchSampler instead"
            )
        batches = ClassBatches(
            self.groups.starts, np.full(self.groups.count, self.batch_size), drop_last=self.drop_last
        )
        return ClassBatchPlan(
            batches=batches,
            samples=self.groups,
            partition=Partition(len(batches), world_size, rank, remainder=self.remainder, consumed=cursor.consumed),
            identity=self._identity(),
            seed=inside.seed,
            epoch=inside.epoch,
            excluded=self._excluded,
            sampler=inner,
        )

    def read(self, state: Mapping[str, Any]) -> Cursor:
        """Return the cursor in a state. The state may come from any number of ranks."""
        of, run = "GroupedBatchSampler", self.bind(Cursor(), Draws())
        assert isinstance(run, _Formed | ClassBatchPlan)
        # Known only for permutations: if indices repeat, counting the batches would read the whole stream.
        most = None if run.length_varies else run.partition.n
        cursor = Cursor.read(state, of=of, plan=self._identity(), unit="batch", most=most, sampler=self.inner.read)
        if self.order == "class":
            check_excluded(state, self._excluded.mark, of=of)
        return cursor

    def _identity(self) -> State:
        return {
            "order_version": ORDER_VERSION,
            "batches": f"groups by {self.order}",
            "batch_size": self.batch_size,
            "drop_last": self.drop_last,
            "samples": len(self.groups),
            **fingerprint_identity(_data_of(self.sampler)),
            "groups": self.groups.digest,
        }


class _Formed(BatchEpochPlan):
    """One rank's batches of one epoch, formed from the samples of all ranks."""

    def __init__(self, sampler: GroupedBatchSampler, inside: EpochPlan, consumed: int) -> None:
        self._sampler, self._inside, self._consumed = sampler, inside, consumed
        self._job = copy.copy(inside)
        """The samples of all ranks."""
        self.rounds: int | None = None
        """How often they have each sample, if equally often."""
        if isinstance(self._job, PartitionedOrder):
            n, begun = self._job.partition.n, self._job.partition.consumed
            self._job.partition = Partition(n, remainder="uneven", consumed=begun)
            self.rounds = None if begun else self._job.rounds
        self.length_varies = self.rounds is None
        self._identity = sampler._identity()
        self.seed, self.epoch = inside.seed, inside.epoch

    @cached_property
    def partition(self) -> Partition:
        """The numbers of this rank's batches."""
        sampler, (rank, world_size) = self._sampler, self._sampler._world.get()
        groups = sampler.groups
        if self.rounds is not None:
            sizes = groups.sizes * self.rounds
        else:
            # Counted once per epoch.
            start = self._inside.cursor(0)
            if sampler._counted is None or sampler._counted[0] != start:
                sampler._counted = start, groups.count_in(groups.of(indices) for indices, _ in self._chunks(_CHUNK))
            sizes = sampler._counted[1]
        counts = sizes // sampler.batch_size if sampler.drop_last else -(-sizes // sampler.batch_size)
        return Partition(int(counts.sum()), world_size, rank, remainder=sampler.remainder, consumed=self._consumed)

    def __len__(self) -> int:
        return len(self.partition)

    def __iter__(self) -> Iterator[Batch]:
        sampler, part = self._sampler, self.partition
        groups, width, drop = sampler.groups, sampler.batch_size, sampler.drop_last
        largest = max(_CHUNK, groups.count * width)
        # Numbers of the next batch of this rank, and of the next one of all ranks.
        mine, number = part.begin + part.rank, 0
        # After its last batch, the epoch is repeated from its first, at other positions.
        blocks = itertools.chain.from_iterable(
            form_batches(self._chunks(largest), groups, width, sampler.order, drop_partial=drop)
            for _ in itertools.count()
        )
        while mine < part.end:
            indices, positions = next(blocks)
            own = range(mine, min(part.end, number + len(indices)), part.world_size)
            if own:
                rows = slice(own.start - number, own.stop - number, part.world_size)
                shift = number // part.n * len(self._job)
                yield from zip(indices[rows].tolist(), positions[rows] + shift, strict=True)
                mine = own[-1] + part.world_size
            number += len(indices)
        self.exhaust()

    def _chunks(self, largest: int) -> Iterator[Indices]:
        """Yield the indices and positions of all ranks in chunks of shape (2, size), which grow up to a size."""
        begin, size = 0, _FIRST_CHUNK
        while begin < len(self._job):
            stop = min(begin + size, len(self._job))
            yield np.stack(self._job.block(begin, stop))
            begin, size = stop, min(size * 4, largest)

    def exhaust(self) -> None:
        self._job.exhaust()

    def cursor(self, count: int) -> Cursor:
        # The start of an epoch does not wait for the number of batches, which may have to be counted.
        consumed = self.partition.consumed_after(count) if count else self._consumed
        return Cursor(
            epoch=self.epoch, consumed=consumed, unit="batch", plan=self._identity, sampler=self._inside.cursor(0)
        )


class Groups(ClassIndex):
    """The group of every sample, as small integers.

    Args:
        ids: one integer per sample, in any range. Unsigned 16-bit numbers are stored unchanged (one or two bytes per
            sample); others are renumbered, in O(N log N) once.

    Raises:
        SamplerError: ids are not a one-dimensional array of integers.
    """

    def __init__(self, ids: npt.ArrayLike) -> None:
        array = np.asarray(ids)
        check_integers("group_ids", array.dtype, array.shape)
        low, high = (int(array.min()), int(array.max())) if array.size else (0, 0)
        if low < 0 or high >= 1 << 16:
            known, array = np.unique(array, return_inverse=True)
            high = len(known) - 1
        # NumPy sorts integers of 16 bits or fewer by radix, in linear time.
        self.ids: npt.NDArray[Any] = np.ascontiguousarray(array, dtype=np.min_scalar_type(high))
        super().__init__(self.ids, high + 1, digest=xxhash.xxh3_64_hexdigest(self.ids.view(np.uint8).data))

    def of(self, indices: Indices) -> npt.NDArray[Any]:
        """Return the groups of samples.

        Raises:
            SamplerError: an index has no group.
        """
        if indices.size:
            low, high = int(indices.min()), int(indices.max())
            if low < 0 or high >= len(self):
                raise SamplerError(
                    f"the sampler yielded index {low if low < 0 else high}, but group_ids has {len(self)} entries: "
                    "pass one for every sample of the dataset"
                )
        return self.ids[indices]

    @cached_property
    def sizes(self) -> Indices:
        """Number of samples of each group: int64 of shape (count,)."""
        return self.count_in(self.ids[a : a + _CHUNK] for a in range(0, len(self.ids), _CHUNK))

    @property
    def starts(self) -> Indices:
        """The place of the first sample of each group, sorted by group, and the number of samples."""
        return np.concatenate([[0], np.cumsum(self.sizes)])

    def count_in(self, chunks: Iterable[npt.NDArray[Any]]) -> Indices:
        """Return how often each group occurs in chunks of groups: int64 of shape (count,)."""
        none = np.zeros(self.count, np.int64)
        return sum((np.bincount(chunk, minlength=self.count) for chunk in chunks), none)


def form_batches(
    chunks: Iterable[Indices], groups: Groups, batch_size: int, order: str, *, drop_partial: bool
) -> Iterator[tuple[Indices, Indices]]:
    """Yield blocks of batches of one size: int64 arrays (indices, positions) of shape (batches, samples).

    Blocks are in the order of the batch numbers. A partial batch is a block of its own.

    Args:
        chunks: the stream in parts: indices and positions, int64 of shape (2, samples).
        groups: of all samples.
        batch_size: number of samples in a full batch.
        order: ``"completion"`` or ``"first"``, see `GroupedBatchSampler`.
        drop_partial: leave out partial batches.
    """
    # Samples that are in no batch yet, in the order of the stream.
    stream: Indices = np.empty((2, 0), np.int64)
    if order == "first":
        stream, chunks = np.hstack([stream, *chunks]), ()
    for chunk in chunks:
        stream = np.hstack([stream, chunk])
        batches = _arrange(groups.of(stream[0]), batch_size)
        full = batches[:, -1] >= 0
        yield from _in_blocks(batches[full], batches[full, -1], stream)
        rest = np.sort(batches[~full], axis=None)
        stream = stream[:, rest[rest >= 0]]
    batches = _arrange(groups.of(stream[0]), batch_size)
    if drop_partial:
        batches = batches[batches[:, -1] >= 0]
    yield from _in_blocks(batches, batches[:, 0] if order == "first" else batches.max(axis=1), stream)


def _arrange(groups: npt.NDArray[Any], batch_size: int) -> Indices:
    """Return the places of the members of each batch, one batch a row. After a group's last member come -1."""
    sizes = np.bincount(groups)
    missing = -sizes % batch_size
    batches = np.full(len(groups) + missing.sum(), -1)
    filled = np.repeat(np.tile([True, False], len(sizes)), np.ravel([sizes, missing], order="F"))
    batches[filled] = np.argsort(groups, kind="stable")
    return batches.reshape(-1, batch_size)


def _in_blocks(batches: Indices, keys: Indices, stream: Indices) -> Iterator[tuple[Indices, Indices]]:
    """Yield batches of `_arrange` in ascending order of their keys, in blocks of batches of one size."""
    indices, positions = stream
    batches = batches[np.argsort(keys)]
    partial = np.flatnonzero(batches[:, -1] < 0)
    cuts = np.unique(np.concatenate([partial, partial + 1, np.arange(0, len(batches), _LARGEST_BLOCK)]))
    for block in np.split(batches, cuts):
        if len(block):
            members = block if block[0, -1] >= 0 else block[block >= 0][None]
            yield indices[members], positions[members]


def group_ids_of(source: Any, bounds: Sequence[float] = (1.0,), *, data: Any = None) -> Any:
    """Return group numbers from an array, or by aspect ratio from `Sizes` or the path of its file.

    Raises:
        ManifestError: the file is not a file of image sizes.
        StateError: the sizes were measured from another manifest than the manifest of the dataset ``data``.
    """
    if isinstance(source, str | os.PathLike):
        # Imported here because it needs OpenCV.
        from penstock.images.sizes import Sizes

        source = Sizes.open(source)
    check_sizes(source, data)
    return source.group_ids(bounds) if hasattr(source, "group_ids") else source


def _data_of(sampler: Any) -> Any:
    """Return the dataset of a sampler; None if it has none."""
    return getattr(sampler, "dataset", getattr(sampler, "data_source", None))


def _checked_sampler(sampler: Iterable[Any], order: str) -> EpochSampler:
    """Return a sampler whose indices are those of the whole job on any number of ranks.

    Raises:
        SamplerError: they are not, or the order of the batches is unknown or cannot be computed from it.
    """
    data = _data_of(sampler)
    if holds_a_share(data):
        raise SamplerError(
            f"batches are formed from the indices of the whole job, but {kind_text(data)} has only one rank's "
            "share: use penstock.DistributedSampler over its manifest"
        )
    if isinstance(sampler, InfiniteSampler):
        raise SamplerError("an InfiniteSampler has no end, so its batches cannot be counted: use a DistributedSampler")
    if isinstance(sampler, EpochBatchSampler):
        raise SamplerError(f"{kind_text(sampler)} already makes batches: pass its own sampler instead")
    # A user's subclass with its own __iter__ may yield other indices than the plan.
    if not isinstance(sampler, EpochSampler) or type(sampler).__iter__ is not EpochSampler.__iter__:
        raise SamplerError(
            f"a GroupedBatchSampler must know the order of the whole job, but that of {kind_text(sampler)} is unknown: "
            "pass a sampler of Penstock (DistributedSampler, RandomSampler, WeightedRandomSampler or "
            "SequentialSampler; with torch's arguments they yield torch's indices); order='class' over a "
            "DistributedSampler needs least time and memory"
        )
    if order not in _ORDERS:
        raise SamplerError(f"unknown order {order!r}: use one of {', '.join(map(repr, _ORDERS))}")
    computed = isinstance(sampler, DistributedSampler | RandomSampler) and sampler.shuffle == "global"
    if isinstance(sampler, RandomSampler) and (sampler.replacement or sampler._num_samples is not None):
        computed = False
    if order == "class" and not computed:
        raise SamplerError(
            "order='class' computes its batches from a seed and an epoch. It needs a penstock.DistributedSampler or "
            f"RandomSampler of all samples with shuffle='global', not this {type(sampler).__name__}: use one of them, "
            "or order='completion'"
        )
    return sampler
