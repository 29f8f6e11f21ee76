"""The interface of ModelTC/rank_dataset on top of `penstock.RankDataset`.

A program that imports from here runs unchanged, with these differences, which fix faults of the original: labels of
more than one character, spaces in paths, blank lines and a last line without newline are read correctly; datasets have
a length; the global NumPy generator is not changed; ``group`` blocks are split among all ranks, instead of one block
per rank; rows are shuffled by the seed, not in file order. With one or several servers (``penstock serve
META_FILE``), rows and row numbers equal those of the local file, ``is_test`` works, and jobs do not affect each
other. New programs should use `penstock.RankDataset` or `penstock.RankServerDataset`, which need no rebuilding between
mini-epochs.

    for epoch in range(90):
        for mini_epoch_idx in range(4):
            dataset = RankDataset("train.txt", reload_cfg=dict(
                mini_epoch=4, seed=epoch, mini_epoch_idx=mini_epoch_idx, group=1))
            for filename, label, index in DataLoader(dataset, batch_size=32, sampler=RandomSampler(dataset)): ...
"""

from __future__ import annotations

from collections.abc import Mapping, Sized
from functools import cached_property
from os import PathLike
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.utils.data import Dataset

from penstock import distributed, samplers
from penstock.datasets import rank as rank_datasets
from penstock.datasets import server as served
from penstock.errors import ConfigError
from penstock.manifest import Manifest, Record

if TYPE_CHECKING:
    from penstock.server import Client

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
"""`penstock.RandomSampler`."""

_CONFIG = {"mini_epoch": 1, "seed": 0, "mini_epoch_idx": 0, "group": 1}
_SERVER_CONFIG = {**_CONFIG, "group": 10, "cache_size": 100_000}


class _WithoutMetas:
    """Says what subclasses for rank_dataset read instead of ``self.metas``, a list of all rows of a rank."""

    # Not a property, so that a subclass can assign a list of its own, as in its parse().
    @cached_property
    def metas(self) -> Any:
        name = type(self).__name__
        raise AttributeError(
            f"{name} has no list of its rows in memory, so self.metas does not exist: call super().__getitem__(idx), "
            f"which reads row idx of this rank ({self._item}), and len(self)"
        )

    _item = "[filename, label, row]"


class BaseDataset(_WithoutMetas, Dataset[str]):
    """All lines of a meta file on every rank, as stripped strings. Memory: O(1), the file is mapped."""

    _item = "its line"

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


class RankDataset(_WithoutMetas, rank_datasets.RankDataset):
    """This rank's share of a mini-epoch; an item is ``[filename, label, row]`` with the label as a string.

    Args:
        meta_file: lines of ``filename label``.
        is_test: every rank reads all rows, in file order.
        reload_cfg: ``mini_epoch`` (mini-epochs per epoch, 1), ``mini_epoch_idx`` (the mini-epoch, 0), ``seed`` (0) and
            ``group`` (blocks, 1).

    Raises:
        ConfigError: an unknown name in reload_cfg.
    """

    def __init__(self, meta_file: str, is_test: bool = False, reload_cfg: Mapping[str, int] | None = None) -> None:
        config, options = _options(reload_cfg, _CONFIG, is_test)
        super().__init__(Manifest.open(meta_file, format="text", label="str"), **options)
        self.pure = True
        self.set_mini_epoch(config["mini_epoch_idx"])


def _options(
    reload_cfg: Mapping[str, int] | None, defaults: Mapping[str, int], is_test: bool
) -> tuple[dict[str, int], dict[str, Any]]:
    """Return the complete configuration, and the options of our datasets for it."""
    config = {**defaults, **(reload_cfg or {})}
    if unknown := sorted(config.keys() - defaults.keys()):
        raise ConfigError(f"reload_cfg has no {', '.join(unknown)}: it takes {', '.join(defaults)}")
    if is_test:
        config["mini_epoch_idx"] = 0
        return config, {"rank": 0, "world_size": 1, "shuffle": "none", "load": _as_list}
    group = config["group"] if config["group"] > 1 else None
    return config, {"mini_epochs": config["mini_epoch"], "seed": config["seed"], "group": group, "load": _as_list}


def _as_list(record: Record) -> list[Any]:
    # A label is as in the meta file, even if the server parses labels as numbers.
    return [record.path, None if record.label is None else str(record.label), record.row]


class DistributedSampler(samplers.DistributedSampler):
    """One rank's share of the indices, every ``world_size``-th in order (the original took a contiguous range)."""

    def __init__(self, dataset: Sized, world_size: int | None = None, rank: int | None = None) -> None:
        super().__init__(dataset, num_replicas=world_size, rank=rank, shuffle=False)


class ServerDataset(served.ServerDataset):
    """All lines of a served meta file on every rank, as strings ``filename label``.

    Args:
        meta_file: name of the served dataset; folder and extension are ignored. ``""`` is the only dataset.
        server_ip, server_port: the address of ``penstock serve``.
        timeout: seconds per request.
        token, token_file: the server's token, or a file that holds it, see `penstock.server.Client`. The original has
            none.

    Raises:
        ServerError: no server answers, it wants another token, or it does not serve the dataset.
    """

    def __init__(
        self,
        meta_file: str,
        server_ip: str,
        server_port: int,
        timeout: float = 1000,
        *,
        token: str | None = None,
        token_file: str | PathLike[str] | None = None,
    ) -> None:
        client = _client(server_ip, server_port, timeout, token, token_file)
        super().__init__(client, _served_name(meta_file), load=_as_line)
        self.pure = True
        self.meta_file = meta_file

    def get_meta_num(self) -> int:
        """Return the number of lines of the meta file."""
        return len(self)

    def get_meta(self, idx: int) -> str:
        """Return one line."""
        line: str = self[idx]
        return line


class RankServerDataset(_WithoutMetas, served.RankServerDataset):
    """This rank's share of a mini-epoch of a served meta file; items as in `RankDataset`.

    Args:
        meta_file, server_ip, server_port, timeout, token, token_file: as in `ServerDataset`.
        is_test: every rank reads all rows, in file order.
        reload_cfg: as in `RankDataset`, but the default of ``group`` is 10; and ``cache_size`` (100000), the most rows
            that are sent together when items are read one by one: at most 64 are.

    Raises:
        ConfigError: an unknown name in reload_cfg.
        ServerError: no server answers, it wants another token, or it has no such dataset.
    """

    def __init__(
        self,
        meta_file: str,
        server_ip: str,
        server_port: int,
        is_test: bool = False,
        reload_cfg: Mapping[str, int] | None = None,
        timeout: float = 1000,
        *,
        token: str | None = None,
        token_file: str | PathLike[str] | None = None,
    ) -> None:
        config, options = _options(reload_cfg, _SERVER_CONFIG, is_test)
        client = _client(server_ip, server_port, timeout, token, token_file)
        super().__init__(client, _served_name(meta_file), page_rows=min(config["cache_size"], 64), **options)
        self.pure = True
        self.set_mini_epoch(config["mini_epoch_idx"])


def _client(
    server_ip: str, server_port: int, timeout: float, token: str | None, token_file: str | PathLike[str] | None
) -> Client:
    from penstock.server import Client  # imported late: it loads gRPC
    from penstock.server.address import Address

    host = server_ip.removeprefix("[").removesuffix("]")
    return Client(str(Address(host, server_port, tls=False)), timeout=timeout, token=token, token_file=token_file)


def _served_name(meta_file: str) -> str | None:
    return PurePath(meta_file).stem or None


def _as_line(record: Record) -> str:
    return record.path if record.label is None else f"{record.path} {record.label}"


def get_rank() -> int:
    """Return the rank of this process."""
    return distributed.current().rank


def get_world_size() -> int:
    """Return the number of ranks of the job."""
    return distributed.current().world_size


def barrier() -> None:
    """Wait for all ranks; do nothing without a process group."""
    if dist.is_available() and dist.is_initialized():
        dist.barrier()
