"""`GroupedBatchSampler`: batches of one group each, formed for the whole job and then dealt to the ranks."""

from __future__ import annotations

import itertools
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
from penstock.order.permutation import MAX_N
from penstock.samplers.base import Batch, BatchPass, Epochs, EpochSampler, NestedBatchSampler
from penstock.samplers.distributed import DistributedSampler
from penstock.samplers.grouping import Groups, Rows, batch_count, by_completion, by_first, deal, fill
from penstock.samplers.identity import check_place, data_of, fingerprint_identity, fingerprint_of
from penstock.samplers.infinite import InfiniteSampler
from penstock.samplers.shares import is_share, refuse_chance, refuse_share
from penstock.samplers.streams import ForeignStream, PassStream, Stream
from penstock.state import STATE_VERSION, State, check_state

if TYPE_CHECKING:
    from penstock.images.sizes import Sizes

__all__ = ["GroupedBatchSampler", "group_ids_of"]

_CHUNK = 1 << 16
_ORDERS = {"completion": by_completion, "first": by_first}


class GroupedBatchSampler(NestedBatchSampler):
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
            does, which has to hold the whole stream (about 40 bytes an index).
        world_size, rank: with other samplers; by default from torch.distributed, RANK and WORLD_SIZE, or 1 and 0, found
            when they are first needed. ``world_size=1``: the batches are this rank's alone, and nothing is dealt.

    Raises:
        SamplerError: no group for a sample, one rank's share as the stream, arguments that contradict each other, or,
            in torch's words, a batch size that is no positive integer or a drop_last that is no bool.
        StateError: sizes that were measured from another manifest than the sampler's.
        PartitionError: a rank outside the world, or (at use) a process group made later that disagrees.

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
    million); where indices repeat, the stream is counted once per epoch; a foreign sampler is run and its indices kept
    for the next pass (8 bytes each).

    The state is the number of global batches had and the state of the sampler at the beginning of the pass: elastic in
    the number of ranks. A resume forms the batches again from the beginning of the epoch, at some 10 million indices
    per second, and every rank forms all of them. Over a foreign sampler it is exact if that repeats its order.

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
        self._told = world_size
        self.groups = Groups(group_ids_of(group_ids, data=data_of(sampler)))
        self.epoch = int(getattr(sampler, "epoch", 0))
        self._foreign: ForeignStream | None = None
        self._counted: tuple[State, int] | None = None
        self._check_size()
        self._refuse_share(self._world.peek().world_size)

    @property
    def world_size(self) -> int:
        """World size; asking settles it."""
        return self._world.get().world_size

    @property
    def rank(self) -> int:
        """Which rank this is; asking settles it."""
        return self._world.get().rank

    @property
    def _groups_a_share(self) -> bool:
        """Whether the stream is one rank's share, which ``world_size=1`` says is to be grouped by itself."""
        if self._told != 1:
            return False
        return is_share(self.sampler, len(self.groups), ranks=distributed.current().world_size) is not False

    @property
    def group_ids(self) -> npt.NDArray[Any]:
        """The group of every sample, numbered from 0."""
        return self.groups.ids

    @property
    def repeated(self) -> list[int]:
        """Numbers of the global batches that are given out twice in the present pass, to fill up its last round."""
        run = self._current()
        assert isinstance(run, _GroupedPass)
        return run.repeated

    @property
    def length_varies(self) -> bool:
        """Whether epochs can have different numbers of batches: where the stream is no permutation."""
        return self.whole().rounds is None

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next pass, of the sampler inside too."""
        super().set_epoch(epoch)
        if self._resume is None:
            self._foreign = None

    def _build(self, resume: State | None) -> BatchPass:
        if isinstance(self.sampler, EpochSampler):
            return self._over(PassStream(self.sampler.peek()), resume)
        return self._over(self._next_foreign(), resume)

    def whole(self) -> _GroupedPass:
        """A pass over the whole epoch, whatever state was loaded; nothing begins."""
        if isinstance(self.sampler, EpochSampler):
            return self._over(PassStream(self.sampler.whole()), None)
        return self._over(self._next_foreign(), None)

    def start(self) -> BatchPass:
        """Begin a pass of the sampler inside."""
        if isinstance(self.sampler, EpochSampler):
            run = self._over(PassStream(self.sampler.start()), self._resume)
            self.epoch = run.epoch
        else:
            run = self._over(self._next_foreign(), self._resume)
            self._foreign = None
        self._pass, self._resume, self.yielded = run, None, 0
        return run

    def finish(self) -> None:
        """The pass that runs has been had to its end: the next one is whole, and of the same epoch."""
        super().finish()
        self._foreign = None

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state at the next ``iter()``, on any number of ranks.

        Raises:
            StateError: the state belongs to other data, groups or batches.
        """
        checked = self._check(state)
        if isinstance(self.sampler, EpochSampler):
            self.sampler.load_state_dict(checked["sampler"])
        elif hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(checked["epoch"])
        self._foreign = None
        self._resume, self._pass, self.yielded = checked, None, 0
        self.epoch = checked["epoch"]

    def _next_foreign(self) -> ForeignStream:
        # The sampler's own set_epoch may have been called since the stream was counted.
        epoch = int(getattr(self.sampler, "epoch", self.epoch))
        if self._foreign is None or self._foreign.epoch != epoch:
            self._foreign = ForeignStream(self.sampler, epoch)
        return self._foreign

    def _over(self, stream: Stream, resume: State | None) -> _GroupedPass:
        self._refuse_share(self.world_size)  # there may have been no process group before
        refuse_chance(self.sampler, self.world_size)
        # A state belongs to the stream that it was taken in: the sampler may have been moved to another epoch since.
        belongs = resume is not None and _place(resume["sampler"]) == _place(stream.state())
        return _GroupedPass(self, stream, resume["consumed"] if resume is not None and belongs else 0)

    def _count(self, stream: Stream) -> int:
        """Batches in a whole pass over a stream, all ranks together; remembered for the stream counted last."""
        key = {"rounds": stream.rounds} if stream.rounds is not None else stream.state()
        if self._counted is None or self._counted[0] != key or isinstance(stream, ForeignStream):
            self._counted = key, batch_count(stream.sizes(self.groups), self.batch_size, self.drop_last)
        return self._counted[1]

    @cached_property
    def _digest(self) -> str:
        return xxhash.xxh3_64_hexdigest(self.groups.ids.view(np.uint8).data)

    def _identity(self) -> State:
        return {
            "version": STATE_VERSION,
            "order_version": ORDER_VERSION,
            "batches": f"groups by {self.order}",
            "batch_size": self.batch_size,
            "drop_last": self.drop_last,
            "samples": len(self.groups),
            **fingerprint_identity(data_of(self.sampler)),
            "groups": self._digest,
        }

    def _check(self, state: Mapping[str, Any]) -> State:
        check_state(state, self._identity(), of="GroupedBatchSampler")
        whole = self.whole()
        # Where indices repeat, the number of batches is that epoch's own, and counting them reads the whole stream.
        check_place(state, MAX_N if whole.rounds is None else whole.total, of="GroupedBatchSampler")
        inner = state.get("sampler")
        if not isinstance(inner, Mapping):
            raise StateError(f"the state of a GroupedBatchSampler holds its sampler's, got {inner!r}")
        if not isinstance(self.sampler, EpochSampler):
            check_state(inner, {"type": type(self.sampler).__name__}, of="GroupedBatchSampler")
        return dict(state)

    def _refuse_share(self, ranks: int) -> None:
        """Raise if one rank's share would be dealt to ranks once more, or may be."""
        if not isinstance(self.sampler, DistributedSampler) and self._told != 1:
            refuse_share(self.sampler, len(self.groups), ranks=ranks, told=self._told is not None)

    def _check_size(self) -> None:
        data = data_of(self.sampler)
        if isinstance(self.sampler, EpochSampler) and data is not None and len(data) != len(self.groups):
            raise SamplerError(
                f"group_ids has {len(self.groups)} entries for a data set of {len(data)} samples: one for each"
            )


class _GroupedPass:
    """One rank's batches of one pass."""

    def __init__(self, sampler: GroupedBatchSampler, stream: Stream, consumed: int) -> None:
        self._stream = stream
        self._consumed = consumed
        self._groups, self._batch_size = sampler.groups, sampler.batch_size
        self._drop_last, self._form = sampler.drop_last, _ORDERS[sampler.order]
        self._rank, self._world_size = sampler._world.get()
        self._remainder = sampler.remainder
        self._of_share = sampler._groups_a_share
        self._count, self._identity = sampler._count, sampler._identity
        self.seed, self.epoch = stream.seed, stream.epoch

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
            # In a share they are not global, and would be those of other samples on other ranks.
            positions = itertools.repeat(None, len(indices)) if self._of_share else ordinals + first
            yield from zip(indices.tolist(), positions, strict=True)
        self.exhaust()

    def exhaust(self) -> None:
        """The pass was read to its end, or will be read no further."""
        self._stream.exhaust()

    def state(self, count: int) -> State:
        consumed = self._consumed + count * self._world_size
        return {
            **self._identity(),
            "sampler": self._stream.state(),
            "epoch": self.epoch,
            "consumed": consumed if self.rounds is None else min(consumed, self.total),  # without those repeated
        }


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


def _refuse_other_streams(sampler: Any) -> None:
    """Raise for what is no stream of the whole job's indices, whatever the world."""
    data = data_of(sampler)
    if getattr(data, "splits_by_rank", False):
        raise SamplerError(
            f"batches are formed from the indices of the whole job, and {type(data).__name__} has only one rank's "
            "share: use penstock.DistributedSampler over its manifest"
        )
    if isinstance(sampler, InfiniteSampler):
        raise SamplerError("an InfiniteSampler has no end and so no batches to count: use a DistributedSampler")
    if isinstance(sampler, Epochs) and not isinstance(sampler, EpochSampler):
        raise SamplerError(f"a {type(sampler).__name__} already makes batches: give the sampler inside it")


def _place(state: Mapping[str, Any]) -> State:
    """A sampler's state without that of a generator, which moves on while others draw from it."""
    return {name: value for name, value in state.items() if name not in ("generator", "begun")}
