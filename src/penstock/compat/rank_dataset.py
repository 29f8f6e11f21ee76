"""The names of ModelTC/rank_dataset on top of `penstock.RankDataset`.

A program that imports from here runs unchanged, with these differences, all of them faults of the original: labels of
more than one character, spaces in paths, blank lines and a last line without newline are read right; data sets have a
length; the global NumPy generator is left alone; ``group`` blocks are dealt to all ranks instead of one block to each;
rows come shuffled by (seed), not in file order. New programs should use `penstock.RankDataset`, which needs no
rebuilding between mini-epochs.

    for epoch in range(90):
        for mini_epoch_idx in range(4):
            dataset = RankDataset("train.txt", reload_cfg=dict(
                mini_epoch=4, seed=epoch, mini_epoch_idx=mini_epoch_idx, group=1))
            for filename, label, index in DataLoader(dataset, batch_size=32, sampler=RandomSampler(dataset)): ...
"""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any, NoReturn

import torch.distributed as dist
from torch.utils.data import Dataset

from penstock import datasets, distributed, samplers
from penstock.errors import ConfigError
from penstock.manifest import Manifest, Record

__all__ = [
    "BaseDataset",
    "DistributedSampler",
    "RandomSampler",
    "RankDataset",
    "RankServerDataset",
    "ServerDataset",
    "barrier",
    "get_rank",
    "get_world_size",
]

RandomSampler = samplers.RandomSampler

_CONFIG = {"mini_epoch": 1, "seed": 0, "mini_epoch_idx": 0, "group": 1}


class BaseDataset(Dataset[str]):
    """Every line of a meta file on every rank, as a stripped string. Memory: O(1), the file is mapped."""

    def __init__(self, meta_file: str) -> None:
        self.meta_file = meta_file
        self.parse()

    def parse(self) -> None:
        """Open the meta file."""
        self.manifest = Manifest.open(self.meta_file, format="text", label=None)

    def __len__(self) -> int:
        return len(self.manifest)

    def __getitem__(self, idx: int) -> str:
        return self.manifest[idx].path.strip()


class RankDataset(datasets.RankDataset):
    """This rank's share of a mini-epoch; an item is ``[filename, label, row]`` with the label as a string.

    Args:
        meta_file: lines of ``filename label``.
        is_test: every rank gets all rows, in the order of the file.
        reload_cfg: ``mini_epoch`` (mini-epochs in an epoch, 1), ``mini_epoch_idx`` (which of them, 0), ``seed`` (0) and
            ``group`` (blocks, 1).

    Raises:
        ConfigError: an unknown name in reload_cfg.
    """

    def __init__(self, meta_file: str, is_test: bool = False, reload_cfg: Mapping[str, int] | None = None) -> None:
        config = {**_CONFIG, **(reload_cfg or {})}
        if unknown := sorted(config.keys() - _CONFIG.keys()):
            raise ConfigError(f"reload_cfg has no {', '.join(unknown)}: it takes {', '.join(_CONFIG)}")
        manifest = Manifest.open(meta_file, format="text", label="str")
        if is_test:
            super().__init__(manifest, rank=0, world_size=1, shuffle="none", load=_as_list)
        else:
            group = config["group"] if config["group"] > 1 else None
            super().__init__(
                manifest, mini_epochs=config["mini_epoch"], seed=config["seed"], group=group, load=_as_list
            )
        self.pure = True
        self.set_mini_epoch(0 if is_test else config["mini_epoch_idx"])


def _as_list(record: Record) -> list[Any]:
    return [record.path, record.label, record.row]


class DistributedSampler(samplers.DistributedSampler):
    """One rank's share of the indices in order, every ``world_size``-th (the original took one contiguous run)."""

    def __init__(self, dataset: Sized, world_size: int | None = None, rank: int | None = None) -> None:
        super().__init__(dataset, num_replicas=world_size, rank=rank, shuffle=False)


def _no_server(name: str, server_ip: str, server_port: int) -> NoReturn:
    raise ConfigError(
        f"{name} needs a metadata server (at {server_ip}:{server_port}), which this version does not have: use "
        "RankDataset with the meta file on a shared file system, or penstock.RankDataset(preload=True) if that is slow"
    )


class ServerDataset:
    """Comes with the metadata server; until then a clear error."""

    def __init__(self, meta_file: str, server_ip: str, server_port: int, timeout: int = 1000) -> None:
        _no_server("ServerDataset", server_ip, server_port)


class RankServerDataset:
    """Comes with the metadata server; until then a clear error."""

    def __init__(
        self,
        meta_file: str,
        server_ip: str,
        server_port: int,
        is_test: bool = False,
        reload_cfg: Mapping[str, int] | None = None,
        timeout: int = 1000,
    ) -> None:
        _no_server("RankServerDataset", server_ip, server_port)


def get_rank() -> int:
    """This rank."""
    return distributed.current().rank


def get_world_size() -> int:
    """The job's ranks."""
    return distributed.current().world_size


def barrier() -> None:
    """Wait for all ranks; nothing without a process group."""
    if dist.is_available() and dist.is_initialized():
        dist.barrier()
