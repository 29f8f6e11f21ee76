"""`TokenBudgetBatchSampler`: batches of samples with similar lengths, as many as a token budget allows."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping, Sized
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
import xxhash

from penstock import distributed
from penstock.errors import PartitionError, SamplerError
from penstock.hashing import checked_seed
from penstock.order import ORDER_VERSION, Partition
from penstock.order.length_classes import LengthClasses
from penstock.plan.class_plan import ClassBatchPlan
from penstock.plan.cursor import Cursor, State
from penstock.plan.exclusion import ExcludedRows, check_excluded
from penstock.plan.reader import Draws
from penstock.samplers.base import EpochBatchSampler, RankMixin
from penstock.samplers.identity import fingerprint_identity, holds_a_share
from penstock.samplers.lengths import lengths_of
from penstock.samplers.orders import positive
from penstock.storage.class_index import ClassIndex
from penstock.wording import counted, kind_text

if TYPE_CHECKING:
    from penstock.images.sizes import Sizes

__all__ = ["TokenBudgetBatchSampler"]

_LONGEST = ("error", "alone", "drop")


class TokenBudgetBatchSampler(RankMixin, EpochBatchSampler):
    """Batches of samples with similar lengths (bucketing) whose padded size is at most a token budget.

    The padded size of a batch is the length of its longest sample times its number of samples.

    Args:
        lengths: of the samples, one integer of 0 or more each (0 counts as 1): an array, the path of an ``.npy`` file,
            which is mapped, or a `penstock.images.sizes.Sizes`, whose areas are the lengths.
        max_tokens: the budget: the largest padded size of a batch.
        data_source: the dataset. Its fingerprint goes into the state; it must have one sample for each length.
        seed: of the order, and of the samples' generators. The same on all ranks.
        classes: the largest number of length classes. Padding falls as 1 / classes. With fewer batches than classes,
            nearly the same batches form in each epoch, in another order: fewer classes mix more, and pad more.
        max_batch: the largest number of samples in a batch.
        longest: how to treat samples longer than ``max_tokens``: ``"error"``; ``"alone"``: each is a batch of its own;
            ``"drop"``: leave them out (`too_long` is their number).
        drop_last: leave out the one batch of the epoch that may be partial, and the last batches that do not divide
            among the ranks.
        remainder: how to treat batches that do not divide among the ranks: ``"pad"``: repeat the first batches of the
            epoch, so that all ranks have the same number; ``"drop"``: leave them out; ``"uneven"``: neither. By default
            ``"drop"`` with ``drop_last``, else ``"pad"``.
        world_size, rank, process_group, mesh: as for `DistributedSampler`.
        cache_dir: folder of the class index, by default in the user's cache folder.
        exclude: samples to leave out, such as damaged ones found during a run; at most 100,000. Another sample of the
            same class replaces each, drawn from (seed, epoch, sample). If a whole class is excluded, the sample comes
            from the next shorter class that has any left. If no shorter sample is left, the batch has samples of the
            shortest remaining class, as many as the budget allows. All other samples keep their positions, so older
            states still load. To load a state saved with excluded samples, exclude at least the same ones.

    Raises:
        SamplerError: lengths are not integers, negative, above the budget, or not one for each sample; or an argument
            is outside its range.
        PartitionError: the rank is outside the world, the dataset is one rank's share, drop_last and remainder
            contradict each other, or (at use) a process group made later disagrees.
        ConfigError, IndexError: a sample to exclude does not exist, or all samples are excluded.
        DataFileError, DataFileIOError: a file of lengths cannot be read, or ``cache_dir`` cannot be written.

    Each epoch permutes the samples of every class, cuts them into batches, and permutes the batches of all classes. So
    the batches of an epoch are a function of (lengths, seed, epoch): each sample is in exactly one, and batch g of the
    job goes to rank ``g % world_size``. `batch` and `batch_of` compute any batch, and the batch of any sample. The
    state is the number of batches that the job has consumed. A resume on any number of ranks begins there at once.

    Memory: O(classes) in each process, and one file of 4 bytes per sample that all processes map. It is written at the
    first batch, in about 0.1 s per million samples, and stays in the cache folder. Fewer than 65,536 samples need no
    file. Construction takes one pass over the lengths.

    >>> lengths = np.array([5, 90, 7, 30, 100, 33, 6, 95])
    >>> batches = TokenBudgetBatchSampler(lengths, 100, seed=1)
    >>> sorted(map(sorted, batches))
    [[0, 6], [1], [2, 3, 5], [4], [7]]
    >>> batches.batch(0) == next(iter(batches)), batches.batch_of(3) == batches.batch_of(5)
    (True, True)
    """

    def __init__(
        self,
        lengths: npt.ArrayLike | Sizes | str | os.PathLike[str],
        max_tokens: int,
        *,
        data_source: Sized | None = None,
        seed: int = 0,
        classes: int = 256,
        max_batch: int | None = None,
        longest: str = "error",
        drop_last: bool = False,
        remainder: str | None = None,
        world_size: int | None = None,
        rank: int | None = None,
        process_group: dist.ProcessGroup | None = None,
        mesh: dist.device_mesh.DeviceMesh | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        exclude: npt.ArrayLike | None = None,
    ) -> None:
        super().__init__()
        if holds_a_share(data_source):
            raise PartitionError(
                f"batches are formed from the samples of the whole job, but {kind_text(data_source)} has only "
                "one rank's share: make the sampler over its manifest"
            )
        if longest not in _LONGEST:
            raise SamplerError(f"unknown longest {longest!r}: use one of {', '.join(map(repr, _LONGEST))}")
        if remainder is not None and drop_last and remainder != "drop":
            raise PartitionError(f"drop_last=True contradicts remainder={remainder!r}")
        self.max_tokens = positive("max_tokens", max_tokens)
        self.max_batch = None if max_batch is None else positive("max_batch", max_batch)
        most = positive("classes", classes)
        self.longest = longest
        self.seed = checked_seed(seed)
        self.data_source = data_source
        self.remainder = remainder or ("drop" if drop_last else "pad")
        self.drop_last = drop_last
        # Raises for an unknown remainder now, not at the first batch.
        Partition(0, remainder=self.remainder)
        self._world = distributed.LateWorld(
            rank, world_size, process_group=process_group, mesh=mesh, of="TokenBudgetBatchSampler"
        )
        self.lengths = lengths_of(lengths, data=data_source)
        self.classes = min(most, max(1, len(self.lengths)))
        self._classes = LengthClasses(self.lengths, self.max_tokens, self.classes)
        self.too_long = int(self._classes.samples[0])
        """Number of samples longer than ``max_tokens``."""
        if longest == "error" and self._classes.misfit is not None:
            sample, length = self._classes.misfit
            raise SamplerError(
                f"sample {sample} has length {length}, but max_tokens is {self.max_tokens} "
                f"({counted(self.too_long, 'sample')} of {len(self.lengths)} longer than that): raise max_tokens, cut "
                "the samples, or pass longest='alone' to make each its own batch or longest='drop' to leave them out"
            )
        self._cuts = self._classes.batches(
            max_batch=self.max_batch, drop_too_long=longest == "drop", drop_last=drop_last
        )
        self.total = len(self._cuts)
        """Number of batches of an epoch over all ranks, without repeats; the same in every epoch."""
        ends = xxhash.xxh3_64_hexdigest(self._classes.longest.tobytes())
        self._samples = ClassIndex(
            self.lengths,
            len(self._classes),
            classify=self._classes.of,
            digest=f"{self.lengths.digest}-{self.max_tokens}-{ends}",
            cache_dir=cache_dir,
        )
        self._excluded = ExcludedRows.by_class(exclude, self._samples, self._cuts.starts)

    @property
    def key_seed(self) -> int:
        """Seed of the samples' generators."""
        return self.seed

    def batch(self, number: int, *, epoch: int | None = None) -> list[int]:
        """Return a batch of the job's epoch, of any rank, by its number.

        Args:
            number: of the batch. Negative numbers count from the end.
            epoch: by default the current one.

        Raises:
            IndexError: the epoch has no such batch.
        """
        ((batch, _),) = self._plan(epoch).numbered(np.array([range(self.total)[operator.index(number)]]))
        return batch

    def batch_of(self, sample: int, *, epoch: int | None = None) -> int:
        """Return the number, in the job's epoch, of the first batch with a sample; -1 if it is dropped or excluded.

        Raises:
            IndexError: the dataset has no such sample.
        """
        if not 0 <= operator.index(sample) < len(self.lengths):
            raise IndexError(f"there is no sample {sample}: samples are numbered from 0 to {len(self.lengths) - 1}")
        return next(iter(self._plan(epoch).numbers_of(sample)), -1)

    # As a plan.

    def bind(self, cursor: Cursor, draws: Draws) -> ClassBatchPlan:
        """Return this rank's batches of the cursor's epoch, from the cursor on."""
        rank, world_size = self._world.get()
        return self._plan(
            cursor.epoch, world_size=world_size, rank=rank, remainder=self.remainder, consumed=cursor.consumed
        )

    def read(self, state: Mapping[str, Any]) -> Cursor:
        """Return the cursor in a state. The state may come from any number of ranks."""
        of = "TokenBudgetBatchSampler"
        cursor = Cursor.read(state, of=of, plan=self._identity(), unit="batch", most=self.total)
        check_excluded(state, self._excluded.mark, of=of)
        return cursor

    def _plan(self, epoch: int | None, **share: Any) -> ClassBatchPlan:
        """Return the batches of an epoch, by default the current one: all of them, or the share of a rank."""
        return ClassBatchPlan(
            batches=self._cuts,
            samples=self._samples,
            partition=Partition(self.total, **share),
            identity=self._identity(),
            seed=self.seed,
            epoch=self.epoch if epoch is None else epoch,
            excluded=self._excluded,
        )

    def _identity(self) -> State:
        return {
            "order_version": ORDER_VERSION,
            "batches": "token budget",
            "max_tokens": self.max_tokens,
            "max_batch": self.max_batch,
            "classes": self.classes,
            "longest": self.longest,
            "drop_last": self.drop_last,
            "samples": len(self.lengths),
            **fingerprint_identity(self.data_source),
            "lengths": self.lengths.digest,
            "seed": self.seed,
        }
