"""`MPDataset`: one rank's samples of a manifest as a stream, for iterable-style loaders with any number of workers.

A rank's samples are first cut into batches, independent of the workers. Worker w of n then yields the samples of
batches w, w + n, ... one by one. torch's loader collects ``batch_size`` samples of one worker and takes the workers in
turn. So the result is batch 0, 1, 2, ..., with the same samples for every number of workers::

    batches of the rank     0   1   2   3   4   5   6
    worker 0 of 3           0           3           6
    worker 1 of 3               1           4
    worker 2 of 3                   2           5
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self, Unpack

import numpy as np

from penstock import distributed
from penstock.datasets.rank import RankDataset
from penstock.errors import ConfigError, StateError
from penstock.manifest import Manifest, Record
from penstock.plan.cursor import State, pack, read_int, read_ints, unpack
from penstock.plan.share import ShareCursor
from penstock.plan.share_options import ShareOptions, check_share
from penstock.sources.batched import StreamDataset

__all__ = ["MPDataset"]


class MPDataset(StreamDataset):
    """An iterable-style dataset whose batches do not depend on the number of workers.

    Args:
        source: a `Manifest`, or a path for `Manifest.open`.
        batch_size: samples in a batch; give the loader the same ``batch_size``.
        drop_last: leave out this rank's last batch if it is incomplete (less than one batch per rank, for any number of
            workers). Leave the loader's own ``drop_last`` False.
        shuffle, seed, rank, world_size, remainder, group, block_size, window, load, process_group: see `RankDataset`.

    Raises:
        ConfigError, PartitionError: invalid arguments.
        ManifestError: the manifest cannot be opened, or a row cannot be parsed.

    ``len`` is the exact number of samples of this rank. ``set_epoch`` reaches persistent workers at their next epoch. A
    worker reads only the rows of its own batches, never the whole file. Memory is O(1) in the length of the manifest.

    State: with a Penstock loader, use the loader's state. With others, `state_dict` counts the samples that this object
    has yielded in its own process (torchdata's StatefulDataLoader asks each worker), or takes your count from
    ``batches=``.
    """

    splits_by_rank = True
    samples: RankDataset

    def __init__(
        self,
        source: Manifest | str | os.PathLike[str],
        *,
        batch_size: int,
        drop_last: bool = False,
        load: Callable[[Record], Any] | None = None,
        **share: Unpack[ShareOptions],
    ) -> None:
        check_share(type(self), share, load)
        if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
            raise ConfigError(f"batch_size must be a positive integer, got {batch_size!r}")
        if share.get("mini_epochs", 1) != 1:
            raise ConfigError("an MPDataset yields whole epochs: for mini_epochs= use a RankDataset")
        self.samples = RankDataset(source, load=load, **share)
        """The same samples as a map-style dataset; index ``i`` is the i-th sample of this rank."""
        self.manifest: Manifest = self.samples.manifest
        """The manifest of the dataset."""
        self.batch_size = batch_size
        self.drop_last = drop_last
        self._yielded = 0
        self._resume: Mapping[str, Any] | None = None

    def __copy__(self) -> Self:
        made = object.__new__(type(self))
        # A copy has its own position, see `SourceDataset`.
        made.__dict__ = {**self.__dict__, "samples": copy.copy(self.samples)}
        return made

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {self.manifest!r}\n{self.samples.plan!r}"

    @property
    def pure(self) -> bool:
        """Whether items depend only on the manifest and `penstock.generator`, see `RankDataset`."""
        return self.samples.pure

    @property
    def seed(self) -> int:
        """Seed of the order."""
        return self.samples.seed

    @property
    def epoch(self) -> int:
        """The current epoch."""
        return self.samples.epoch

    def __len__(self) -> int:
        n = len(self.samples)
        return n - n % self.batch_size if self.drop_last else n

    def __iter__(self) -> Iterator[Any]:
        """Yield the samples of this worker's batches, starting at a loaded state's position.

        An epoch that is set during the iteration takes effect at the next ``iter()``.
        """
        resume, self._resume = self._resume, None
        plan, worker = self.samples.plan, distributed.worker()
        plan.show(ShareCursor.at(plan.shown), loaded=False, running=True)
        self._yielded = skip = 0
        if resume is not None:
            if resume["worker"] != [worker.id, worker.total]:
                raise StateError(
                    f"this state belongs to worker {resume['worker'][0]} of {resume['worker'][1]}, and this is worker "
                    f"{worker.id} of {worker.total}: use a Penstock loader, whose state fits any number of workers"
                )
            # This worker yielded these samples before the state was saved.
            self._yielded = skip = int(resume["yielded"])
        end, place = len(self), self.samples.place
        view = plan.view(place)
        for start in range(worker.id * self.batch_size, end, worker.total * self.batch_size):
            indices = np.arange(start, min(start + self.batch_size, end))
            consumed = min(skip, len(indices))
            skip -= consumed
            if consumed == len(indices):
                continue
            rest = indices[consumed:].tolist()
            for item in self.samples.load_samples(rest, view.keys(view.local(rest)), place):
                self._yielded += 1
                yield item

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch, see `RankDataset.set_epoch`."""
        if not (self._resume is not None and epoch == self.epoch):
            self._resume = None
            self._yielded = 0
            self.samples.set_epoch(epoch)

    def state_dict(self, batches: int | None = None) -> State:
        """Return the state of this rank.

        Args:
            batches: the number of batches that every rank has received since the last `set_epoch` or load; the state
                can then be loaded on any number of workers and ranks. By default, the number of samples that this
                object has yielded in this process.
        """
        if batches is not None:
            return self.samples.state_dict(min(batches * self.batch_size, len(self)))
        worker = distributed.worker()
        if worker.total == 1:
            return self.samples.state_dict(min(self._yielded, len(self)))
        entries = unpack(self.samples.state_dict(), of="dataset")
        return pack({**entries, "worker": list(worker), "yielded": self._yielded})

    def load_state_dict(self, state: Mapping[str, Any], *, allow_growth: bool = False) -> None:
        """Go to the position of a state, see `RankDataset.load_state_dict`.

        Raises:
            StateError: the state is of another manifest or order, or of a worker of another layout.
        """
        entries = unpack(state, of="dataset")
        if "worker" in entries:
            read_ints(entries, "worker", 2, of="dataset")
            read_int(entries, "yielded", of="dataset")
        self.samples.load_state_dict(state, allow_growth=allow_growth)
        self._yielded = 0
        self._resume = entries if "worker" in entries else None
