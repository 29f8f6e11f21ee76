"""`GroupedBatchSampler`: batches of one group each, formed for the whole job and then dealt to the ranks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from penstock import distributed
from penstock.errors import SamplerError, StateError
from penstock.order import ORDER_VERSION, Partition
from penstock.order.class_batches import ClassBatches, EpochBatches
from penstock.plan.class_plan import ClassBatchPlan, SampleClasses
from penstock.plan.cursor import Cursor, State
from penstock.plan.epoch import Batch, BatchEpochPlan, EpochPlan
from penstock.plan.exclusion import check_excluded
from penstock.plan.reader import Wish
from penstock.samplers.base import EpochBatchSampler, EpochSampler, OfRank
from penstock.samplers.distributed import DistributedSampler
from penstock.samplers.external import said_epoch
from penstock.samplers.grouping import Groups, Rows, batch_count, by_completion, by_first, deal, fill
from penstock.samplers.identity import data_of, fingerprint_identity, fingerprint_of, holds_a_share
from penstock.samplers.infinite import InfiniteSampler
from penstock.samplers.plan_of import plan_of
from penstock.samplers.random import RandomSampler
from penstock.samplers.shares import dealer, is_share, refuse_chance, refuse_share
from penstock.samplers.streams import ExternalStream, JobStream, Stream

if TYPE_CHECKING:
    from penstock.images.sizes import Sizes

__all__ = ["GroupedBatchSampler", "group_ids_of"]

_CHUNK = 1 << 16
_REPLAYED = {"completion": by_completion, "first": by_first}
_ORDERS = (*_REPLAYED, "class")


class GroupedBatchSampler(OfRank, EpochBatchSampler):
    """Batches whose members all belong to one group, such as images of one orientation.

    Args:
        sampler: the indices. With a Penstock `DistributedSampler` its global order, epoch, seed, world size and rank
            are used, and its ``remainder`` says what becomes of batches that do not go round. Any other sampler or
            iterable is the stream of the whole job and must be the same on all ranks. One rank's share is refused (see
            below), unless ``world_size=1`` says that it is to be grouped by itself.
        group_ids: one integer per sample of the data set, a `penstock.images.sizes.Sizes`, or the path of its file
            (aspect ratios: wider than high, and the others).
        batch_size: positive.
        drop_uneven: maskrcnn-benchmark's name for ``drop_last``, in its place among the arguments.
        drop_last: leave out batches that are not full, and the last full ones that do not go round.
        order: ``"completion"``: a batch is given out when it is full, in memory of a chunk plus groups x batch_size;
            partial batches come at the end. ``"first"``: in the order of their first members, as maskrcnn-benchmark
            does, which has to hold the whole stream (about 40 bytes an index). ``"class"``: by arithmetic, in random
            order: each epoch permutes the samples of every group, and all batches. The sampler has to be ours with
            ``shuffle="global"``, and gives its seed and ranks; a resume begins at once.
        exclude: with ``order="class"``, samples that no batch has any more, 100,000 at most. In the place of each
            stands another one of its group, drawn from (seed, epoch, sample); if all of a group are excluded, its
            batches are of the next group that has some left, or of the last one. All else stays what it is, and a state
            from before fits. One from then on fits the same excluded samples, or more.
        world_size, rank: with other samplers; by default from torch.distributed, RANK and WORLD_SIZE, or 1 and 0, found
            when they are first needed. ``world_size=1``: the batches are this rank's alone, and nothing is dealt.

    Raises:
        SamplerError: no group for a sample, one rank's share as the stream, arguments that contradict each other, or,
            in torch's words, a batch size that is no positive integer or a drop_last that is no bool.
        StateError: sizes that were measured from another manifest than the sampler's.
        PartitionError: a rank outside the world, or (at use) a process group made later that disagrees.
        ConfigError, IndexError: samples to exclude that there are not, or all of them.

    A share is torch's DistributedSampler and any sampler that has its ``num_replicas`` or ``rank``, the order of a
    RankDataset, and on several ranks a sampler that is not ours and shorter than ``group_ids``: dealt to ranks once
    more, part of the data would never be seen. On several ranks a sampler without a length can be either, and has to be
    told by ``world_size``. Under ``world_size=1`` a share is grouped by itself, as in maskrcnn-benchmark: then ranks
    may have different numbers of batches, and the state is that of one rank.

    Batches are numbered over the whole job, and number g goes to rank ``g % world_size``, so all ranks have equally
    many: by repeating the first batches of the epoch (`repeated`, the only repetition there is), or with ``drop_last``
    by leaving the last ones out; with a sampler of ``remainder="uneven"`` neither, and they differ by one. Every index
    of the stream, repeats included, is in exactly one batch.

    ``len`` is exact at any time. Over a permutation it costs one pass over ``group_ids`` (one byte a sample, 1 ms a
    million); where indices repeat, the stream is counted once per epoch; a sampler that is neither ours nor torch's is
    run and its indices kept for the next pass (8 bytes each).

    The state is the number of global batches had and the state of the sampler at the beginning of the pass: elastic in
    the number of ranks. A resume forms the batches again from the beginning of the epoch, at some 10 million indices
    per second, and every rank forms all of them; with ``order="class"`` it costs nothing. Over a sampler that is
    neither ours nor torch's it is exact if that repeats its order, and refused if not.

    >>> batches = GroupedBatchSampler(range(7), [0, 1, 0, 1, 0, 0, 1], 2, world_size=1, rank=0)
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
    ) -> None:
        super().__init__()
        if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size <= 0:
            raise SamplerError(f"batch_size should be a positive integer value, but got batch_size={batch_size}")
        drop_last = drop_uneven or drop_last
        if not isinstance(drop_last, bool):
            raise SamplerError(f"drop_last should be a boolean value, but got drop_last={drop_last}")
        if order not in _ORDERS:
            raise SamplerError(f"unknown order {order!r}: use one of {', '.join(map(repr, _ORDERS))}")
        _refuse_other_streams(sampler)
        self.sampler = sampler
        # One rank's share is grouped as it comes: its plan is that of all ranks.
        if isinstance(sampler, DistributedSampler):
            self._plan: EpochSampler | None = sampler
        else:
            self._plan = None if dealer(sampler, ranks=1) is not None and not _ours(sampler) else plan_of(sampler)
        self.batch_size = batch_size
        self.drop_last = self.drop_uneven = drop_last
        self.order = order
        if isinstance(sampler, DistributedSampler):
            if world_size is not None or rank is not None:
                raise SamplerError("world_size and rank are those of the DistributedSampler: leave them out")
            self._world = sampler._world
            self.remainder = "drop" if drop_last else sampler.remainder
        else:
            rank = 0 if world_size == 1 and rank is None else rank
            self._world = distributed.LateWorld(rank, world_size, of="GroupedBatchSampler")
            self.remainder = "drop" if drop_last else "pad"
        self._given = world_size
        self.groups = Groups(group_ids_of(group_ids, data=data_of(sampler)))
        self._epoch = self._shown = said_epoch(sampler) or 0
        self._counted: tuple[Any, int] | None = None
        self._told: Any = "nothing"  # the wish inside, when this sampler itself was told something
        self._shown_at: Any = "nothing"
        self._check_size()
        self._refuse_share(self._world.peek().world_size)
        if order == "class":
            _refuse_other_orders(sampler)
        elif exclude is not None:
            raise SamplerError(f"exclude= replaces samples by arithmetic: use order='class', not order={order!r}")
        self._excluded = None if exclude is None else self._classes.without(exclude, self._cuts.starts)

    @property
    def _groups_a_share(self) -> bool:
        """Whether the stream is one rank's share, which ``world_size=1`` says is to be grouped by itself."""
        if self._given != 1:
            return False
        return is_share(self.sampler, len(self.groups), ranks=distributed.current().world_size) is not False

    @property
    def group_ids(self) -> npt.NDArray[Any]:
        """The group of every sample, numbered from 0."""
        return self.groups.ids

    @property
    def repeated(self) -> list[int]:
        """Numbers of the global batches that are given out twice in the present pass, to fill up its last round."""
        run = self._reader.peek()
        assert isinstance(run, _Grouped | ClassBatchPlan)
        return run.repeated

    @property
    def length_varies(self) -> bool:
        """Whether epochs can have different numbers of batches: where the stream is no permutation."""
        run = self._reader.whole()
        assert isinstance(run, _Grouped | ClassBatchPlan)
        return run.rounds is None

    # As a plan.

    @property
    def inner(self) -> EpochSampler | None:
        """The plan of the sampler, if it is one of ours or torch's; None where its order is known to nobody else."""
        return self._plan

    @property
    def advances(self) -> bool:  # type: ignore[override]
        """Whether a loader goes on to the next epoch by itself: not where the sampler says its own."""
        return said_epoch(self.sampler) is None if self.inner is None else self.inner.advances

    @property
    def key_seed(self) -> int | None:
        """Seed of the samples' generators."""
        return None if self.inner is None else self.inner.key_seed

    @property
    def draws_late(self) -> bool:
        """Whether reading the plan moves a generator that others draw from."""
        return getattr(self.sampler, "generator", None) is not None

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass, of the sampler inside too."""
        wish = self.wish()
        super().set_epoch(epoch)
        if wish.loaded and wish.cursor.epoch == epoch:
            # The state may be one that the sampler inside was given. From here on it is this sampler's.
            self._epoch, self._cursor = epoch, wish.cursor
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)
        self._told = self._shown_at = self._times_inside()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state at the next ``iter()``, on any number of ranks.

        Raises:
            StateError: the state belongs to other data, groups or batches.
        """
        super().load_state_dict(state)
        self._told = self._shown_at = self._times_inside()

    @property
    def times_set(self) -> Any:
        """Changes with every wish."""
        return self._times_set, self._times_inside()

    def wish(self) -> Wish:
        """Return where the next reader should begin: where this sampler was told, or the one inside since."""
        if self._times_inside() == self._told:
            return super().wish()
        if self.inner is None:
            return Wish(Cursor(epoch=self._epoch_inside()), False)
        own = self.inner.wish()
        cursor = Cursor(epoch=own.cursor.epoch, sampler=own.cursor if own.loaded else None)
        return Wish(cursor, own.loaded)

    def _times_inside(self) -> Any:
        return self._epoch_inside() if self.inner is None else self.inner.times_set

    def _epoch_inside(self) -> int:
        said = said_epoch(self.sampler)
        return self._epoch if said is None else said

    def _epoch_shown(self) -> int:
        # The sampler inside may have been told of another epoch since.
        return super()._epoch_shown() if self._shown_at == self._times_inside() else self.wish().cursor.epoch

    def show(self, cursor: Cursor, *, loaded: bool, running: bool) -> None:
        """Take note of where a reader is."""
        super().show(cursor, loaded=loaded, running=running)
        if self.inner is not None:
            self.inner.show(self._inner_cursor(cursor), loaded=loaded, running=running)
        self._shown_at = self._times_inside()

    def chosen(self, cursor: Cursor) -> None:
        """Take note that the user of a reader chose this cursor."""
        if self.inner is not None:
            if cursor.sampler is not None:
                self.inner.chosen(cursor.sampler)
        elif hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(cursor.epoch)

    def draw(self, cursor: Cursor, held: Any, seed: int | None) -> Any:
        """Return the source of chance of the sampler inside; of one that is not ours the stream itself."""
        if self.inner is not None:
            return self.inner.draw(self._inner_cursor(cursor), held, seed)
        if isinstance(held, ExternalStream) and held.epoch == cursor.epoch and cursor.sampler is None:
            return held
        return ExternalStream(self.sampler, self._inner_cursor(cursor))

    def bind(self, cursor: Cursor, entropy: Any) -> BatchEpochPlan:
        """Return this rank's batches of the cursor's epoch, from the cursor on."""
        self._refuse_share(self.world_size)  # there may have been no process group before
        refuse_chance(self.sampler, self.world_size)
        stream: Stream = entropy
        if self.inner is not None:
            inside = self.inner.bind(self._inner_cursor(cursor), entropy)
            if self.order == "class":
                return self._bind_classes(inside, cursor)
            stream = JobStream(inside)
        return _Grouped(self, stream, cursor.consumed)

    def _bind_classes(self, inside: EpochPlan, cursor: Cursor) -> ClassBatchPlan:
        """Return the batches of all samples, by arithmetic."""
        inner = inside.cursor(0)
        if inner.consumed:
            raise StateError(
                f"the state that the {type(self.sampler).__name__} was given is of the middle of an epoch, and "
                "order='class' has batches of whole epochs: load the state of this GroupedBatchSampler"
            )
        rank, world_size = self._world.get()
        run = EpochBatches(self._cuts, inside.seed or 0, inside.epoch)
        partition = Partition(len(run), world_size, rank, remainder=self.remainder, consumed=cursor.consumed)
        return ClassBatchPlan(
            run,
            self._classes,
            partition,
            self._identity(),
            seed=inside.seed,
            epoch=inside.epoch,
            sampler=inner,
            excluded=self._excluded,
        )

    @cached_property
    def _cuts(self) -> ClassBatches:
        starts = np.concatenate([[0], np.cumsum(self.groups.sizes())])
        return ClassBatches(starts, np.full(self.groups.count, self.batch_size), drop_last=self.drop_last)

    @cached_property
    def _classes(self) -> SampleClasses:
        return SampleClasses(self.groups.ids, self.groups.count, digest=self._digest)

    def read(self, state: Mapping[str, Any]) -> Cursor:
        """Return the cursor that a state of any number of ranks holds."""
        cursor = Cursor.read(
            state, of="GroupedBatchSampler", plan=self._identity(), unit="batch", sampler=self._read_inside
        )
        mark = None if self._excluded is None else self._excluded.mark
        check_excluded(state, mark, of="GroupedBatchSampler")
        run = self.bind(self.whole(cursor), self.draw(cursor, None, None))
        assert isinstance(run, _Grouped | ClassBatchPlan)
        # Where indices repeat, the number of batches is that epoch's own, and counting them reads the whole stream.
        if run.rounds is not None and cursor.consumed > run.total:
            raise StateError(
                f"this state of a GroupedBatchSampler is damaged: it has consumed {cursor.consumed} of {run.total} "
                "batches (consumed= in the state, and the length here). Resume from another state, or start anew "
                "without one"
            )
        return cursor

    def _read_inside(self, state: Mapping[str, Any]) -> Cursor:
        if self.inner is not None:
            return self.inner.read(state)
        return Cursor.read(state, of="GroupedBatchSampler", plan={"order": type(self.sampler).__name__})

    def _inner_cursor(self, cursor: Cursor) -> Cursor:
        """Return the sampler's cursor at the beginning of the epoch."""
        return Cursor(epoch=cursor.epoch) if cursor.sampler is None else cursor.sampler

    def _count(self, stream: Stream) -> int:
        """Batches in a whole pass over a stream, all ranks together; remembered for the stream counted last."""
        key = stream.rounds if stream.rounds is not None else stream.cursor()
        if self._counted is None or self._counted[0] != key or isinstance(stream, ExternalStream):
            self._counted = key, batch_count(stream.sizes(self.groups), self.batch_size, self.drop_last)
        return self._counted[1]

    @cached_property
    def _digest(self) -> str:
        return xxhash.xxh3_64_hexdigest(self.groups.ids.view(np.uint8).data)

    def _identity(self) -> State:
        return {
            "order_version": ORDER_VERSION,
            "batches": f"groups by {self.order}",
            "batch_size": self.batch_size,
            "drop_last": self.drop_last,
            "samples": len(self.groups),
            **fingerprint_identity(data_of(self.sampler)),
            "groups": self._digest,
        }

    def _refuse_share(self, ranks: int) -> None:
        """Raise if one rank's share would be dealt to ranks once more, or may be."""
        if not isinstance(self.sampler, DistributedSampler) and self._given != 1:
            refuse_share(self.sampler, len(self.groups), ranks=ranks, told=self._given is not None)

    def _check_size(self) -> None:
        data = data_of(self.sampler)
        if isinstance(self.sampler, EpochSampler) and data is not None and len(data) != len(self.groups):
            raise SamplerError(
                f"group_ids has {len(self.groups)} entries for a data set of {len(data)} samples: one for each"
            )


class _Grouped(BatchEpochPlan):
    """One rank's batches of one epoch."""

    def __init__(self, sampler: GroupedBatchSampler, stream: Stream, consumed: int) -> None:
        self._stream = stream
        self._consumed = consumed
        self._groups, self._batch_size = sampler.groups, sampler.batch_size
        self._drop_last, self._form = sampler.drop_last, _REPLAYED[sampler.order]
        self._rank, self._world_size = sampler._world.get()
        self._remainder = sampler.remainder
        self._count, self._identity = sampler._count, sampler._identity()
        self.seed, self.epoch = stream.seed, stream.epoch
        # In a share, ordinals are not global, and would be those of other samples on other ranks.
        self.per_rank = sampler._groups_a_share

    @cached_property
    def total(self) -> int:
        """Batches of the whole epoch, all ranks together, without repeats."""
        return self._count(self._stream)

    @property
    def rounds(self) -> int | None:
        """How often the stream has every sample, if all of them equally often; else None."""
        return self._stream.rounds

    @property
    def repeated(self) -> list[int]:
        """Numbers of the batches that are repeated at the end."""
        return fill(self.total, self._world_size, self._consumed) if self._remainder == "pad" else []

    def __len__(self) -> int:
        return len(
            Partition(self.total, self._world_size, self._rank, remainder=self._remainder, consumed=self._consumed)
        )

    def __iter__(self) -> Iterator[Batch]:
        chunks = self._stream.chunks(max(_CHUNK, self._groups.count * self._batch_size))
        blocks = self._form(chunks, self._groups.of, self._batch_size, self._drop_last)
        first = self._stream.first
        mine: Iterator[Rows] = deal(blocks, self._world_size, self._rank, self._consumed, self._remainder)
        for indices, ordinals in mine:
            yield from zip(indices.tolist(), ordinals + first, strict=True)
        self.exhaust()

    def exhaust(self) -> None:
        self._stream.exhaust()

    def cursor(self, count: int) -> Cursor:
        consumed = self._consumed + count * self._world_size
        if self.rounds is not None:
            consumed = min(consumed, self.total)  # without those repeated
        return Cursor(
            epoch=self.epoch, consumed=consumed, unit="batch", plan=self._identity, sampler=self._stream.cursor()
        )


def group_ids_of(source: Any, bounds: Sequence[float] = (1.0,), *, data: Any = None) -> Any:
    """Group numbers from an array, or by aspect ratio from `Sizes` or the path of a file of sizes.

    Raises:
        ManifestError: the file is no file of image sizes.
        StateError: its sizes were measured from another manifest than that of the data set ``data``.
    """
    if isinstance(source, str | os.PathLike):
        source = _open_sizes(source)
    here, there = fingerprint_of(data), getattr(source, "fingerprint", None)  # that of the manifest of the sizes
    if here is not None and there is not None and here != there:
        raise StateError(
            f"these image sizes belong to another manifest or an older version of it: their fingerprint is {there} "
            f"and that of the data set {here}; measure again with: penstock manifest sizes FILE"
        )
    return source.group_ids(bounds) if hasattr(source, "group_ids") else source


def _open_sizes(path: str | os.PathLike[str]) -> Sizes:
    """The sizes in a file, of whichever manifest they are: a sampler knows only how many samples there should be."""
    from penstock.images.sizes import Sizes  # OpenCV is not needed by those who have no images

    found = ("", -1)
    if os.path.isfile(path):
        with pa.memory_map(os.fspath(path)) as file:
            try:
                metadata = pa.ipc.open_file(file).schema.metadata or {}
                found = metadata[b"penstock.fingerprint"].decode(), int(metadata[b"penstock.rows"])
            except (pa.ArrowInvalid, KeyError, ValueError):
                pass  # Sizes says better what is wrong with the file
    return Sizes(Path(path), *found)


def _ours(sampler: Any) -> bool:
    return isinstance(sampler, EpochSampler)


def _refuse_other_orders(sampler: Any) -> None:
    """Raise for a sampler that is no random order of all samples by (seed, epoch)."""
    known = isinstance(sampler, DistributedSampler | RandomSampler) and sampler.shuffle == "global"
    if not known or (isinstance(sampler, RandomSampler) and (sampler.replacement or sampler._num_samples is not None)):
        raise SamplerError(
            "order='class' computes its batches from a seed and an epoch, and takes a penstock.DistributedSampler or "
            f"RandomSampler of all samples with shuffle='global', not this {type(sampler).__name__}: use one, or "
            "order='completion'"
        )


def _refuse_other_streams(sampler: Any) -> None:
    """Raise for what is no stream of the whole job's indices, whatever the world."""
    data = data_of(sampler)
    if holds_a_share(data):
        raise SamplerError(
            f"batches are formed from the indices of the whole job, and {type(data).__name__} has only one rank's "
            "share: use penstock.DistributedSampler over its manifest"
        )
    if isinstance(sampler, InfiniteSampler):
        raise SamplerError("an InfiniteSampler has no end and so no batches to count: use a DistributedSampler")
    if isinstance(sampler, EpochBatchSampler):
        raise SamplerError(f"a {type(sampler).__name__} already makes batches: give the sampler inside it")
