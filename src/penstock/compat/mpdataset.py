"""The interface of MPDataset on top of Penstock: the index stream of the project MPDataset, and ZCls's image dataset.

``MPDataset(length, ...)`` yields indices, ``MPDataset(root, ...)`` yields ``(image, target)`` of a folder that holds
``data.csv`` (lines of ``path,,int``) and ``cls.csv`` (one class name a line). Differences, which fix faults of the
original: ``epoch`` and ``drop_last`` also work with one GPU; every epoch has another order; `set_epoch` reaches
persistent workers; no worker reads the whole file. With ``batch_size=``, batches do not depend on the number of
workers; without it, samples are split among workers one by one, as before.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import cv2
from torch.utils.data import IterableDataset

from penstock import distributed, samplers
from penstock.datasets import stream
from penstock.errors import ConfigError, ManifestError
from penstock.images.decode import read_image
from penstock.manifest import Manifest, Record
from penstock.order import Partition, make_order
from penstock.plan.shared import SharedIntegers

__all__ = ["DistributedSampler", "MPDataset"]


class MPDataset(IterableDataset[Any]):
    """A stream of one rank's indices (``length`` an int) or images (``length`` a folder).

    Args:
        length: number of samples, or the root folder of images.
        shuffle: a new order for every epoch; the seed is 0.
        num_gpus, rank_id: world size and rank.
        epoch: the first epoch.
        drop_last: drop the samples at the end that do not fill a batch on every rank.
        batch_size: the batch size of the loader, see the module.

    With a folder also ``transform``, ``target_transform``, ``top_k`` and ``keep_rgb``, as in ZCls.

    Raises:
        ConfigError, PartitionError: invalid arguments.
    """

    def __new__(cls, length: Any = 0, *args: Any, **kwargs: Any) -> MPDataset:
        """Return the image dataset if the first argument is a folder."""
        if isinstance(length, str | os.PathLike) or "root" in kwargs:
            folder = _ImageMPDataset(*(() if "root" in kwargs else (length,)), *args, **kwargs)
            return cast(MPDataset, folder)
        return super().__new__(cls)

    def __init__(
        self,
        length: int,
        shuffle: bool = False,
        num_gpus: int = 1,
        rank_id: int = 0,
        epoch: int = 0,
        drop_last: bool = False,
        *,
        batch_size: int = 1,
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size must be positive, got {batch_size}")
        self.length, self.shuffle = length, shuffle
        self.batch_size, self.drop_last = batch_size, drop_last
        self._partition = Partition(length, num_gpus, rank_id, remainder="drop" if drop_last else "pad")
        self._epoch = SharedIntegers([epoch])

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, also in running workers."""
        self._epoch.set([epoch])

    def __len__(self) -> int:
        n = len(self._partition)
        return n - n % self.batch_size if self.drop_last else n

    def __iter__(self) -> Iterator[int]:
        (epoch,) = self._epoch.get()
        order = make_order("global" if self.shuffle else "none", self.length, epoch=epoch)
        worker = distributed.worker()
        step = worker.total * self.batch_size
        for start in range(worker.id * self.batch_size, len(self), step):
            positions = self._partition.positions(start, min(start + self.batch_size, len(self)))
            yield from order[positions % max(self.length, 1)].tolist()


class _ImageMPDataset(stream.MPDataset):
    """ZCls's image dataset: yields ``(image, target)``, in BGR unless ``keep_rgb``."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        top_k: Sequence[int] = (1, 5),
        keep_rgb: bool = False,
        shuffle: bool = False,
        num_gpus: int = 1,
        rank_id: int = 0,
        epoch: int = 0,
        drop_last: bool = False,
        *,
        batch_size: int = 1,
    ) -> None:
        self.root, self.top_k = root, tuple(top_k)
        classes = os.path.join(root, "cls.csv")
        try:
            with open(classes, encoding="utf-8") as file:
                self.classes = [line.strip() for line in file if line.strip()]
        except OSError as error:
            raise ManifestError(
                f"{classes}: cannot be read: {error.strerror}; it must hold one class name per line"
            ) from error
        manifest = Manifest.open(
            os.path.join(root, "data.csv"), format="csv", header=False, columns=["path", "unused", "label"], root=root
        )
        super().__init__(
            manifest,
            batch_size=batch_size,
            drop_last=drop_last,
            remainder="drop" if drop_last else "pad",
            shuffle="global" if shuffle else "none",
            rank=rank_id,
            world_size=num_gpus,
            load=functools.partial(_load, transform=transform, target_transform=target_transform, keep_rgb=keep_rgb),
        )
        self.set_epoch(epoch)


def _load(record: Record, *, transform: Any, target_transform: Any, keep_rgb: bool) -> tuple[Any, Any]:
    image: Any = read_image(record.path)
    if not keep_rgb:
        image = cv2.cvtColor(image, cv2.COLOR_RGB2BGR)
    target = record.label
    if transform is not None:
        image = transform(image)
    return image, target if target_transform is None else target_transform(target)


class DistributedSampler(samplers.DistributedSampler):
    """A sampler with torch's signature, but with a length instead of a dataset."""

    def __init__(
        self,
        length: int,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__(range(length), num_replicas, rank, shuffle, seed, drop_last)
