"""What is planned (`Job`), and what is assumed of programs and machines (`Assumptions`)."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from penstock.errors import ConfigError
from penstock.order import SHUFFLES
from penstock.order.partition import REMAINDERS
from penstock.order.permutation import MAX_N
from penstock.order.shuffle import DEFAULT_BLOCK_SIZE, DEFAULT_WINDOW

__all__ = ["Assumptions", "Job"]

_POSITIVE = (
    *("sample_bytes", "delivered_bytes", "line_bytes", "ranks", "ranks_per_node", "batch_size", "mini_epochs"),
    *("block_size", "window", "classes", "step_s", "node_bandwidth", "total_bandwidth", "read_rows"),
    *("workers", "prefetch", "cores", "epochs"),
)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run of training. Sizes are in bytes, times in seconds, rates in bytes a second.

    Args:
        samples: rows of the manifest.
        sample_bytes: stored, of one sample on average.
        delivered_bytes: of one sample in the batch, such as 3 x 224 x 224; None for as many as are stored.
        line_bytes: of one row in the manifest's file.
        ranks: of the whole job.
        ranks_per_node: on each node; the last node may have fewer. Plans are for a full one.
        batch_size: of each rank.
        drop_last: leave out batches that are not full.
        remainder: what the partition does with the last samples: "pad", "drop" or "uneven".
        mini_epochs: parts of an epoch, as of `RankDataset`.
        shuffle, block_size, window, seed: the order.
        classes: different labels, equally many of each, in a file sorted by class; None to leave them out.
        step_s: what a training step takes without waiting for data; None: as fast as the data comes.
        node_bandwidth, total_bandwidth: of the storage, for one node and for all of them; None for no limit.
        cache_bytes: of each node, for the samples' files: the page cache or local copies.
        read_rows: rows that one read brings: 1 for files and ranges of their own, more for shards and pages.
        workers, prefetch: of each rank's loader.
        cpu_s: of processor time that a worker needs for a sample.
        cores: of each node that workers may use; None for as many as there are workers.
        epochs: to be planned, 1 or more.

    Raises:
        ConfigError: a number outside its range, an unknown shuffle or remainder.
    """

    samples: int
    sample_bytes: int
    delivered_bytes: int | None = None
    line_bytes: float = 38.0
    ranks: int = 1
    ranks_per_node: int = 8
    batch_size: int = 256
    drop_last: bool = False
    remainder: str = "pad"
    mini_epochs: int = 1
    shuffle: str = "global"
    block_size: int = DEFAULT_BLOCK_SIZE
    window: int = DEFAULT_WINDOW
    seed: int = 0
    classes: int | None = None
    step_s: float | None = None
    node_bandwidth: float | None = None
    total_bandwidth: float | None = None
    cache_bytes: int = 0
    read_rows: int = 1
    workers: int = 4
    prefetch: int = 2
    cpu_s: float = 0.0025
    cores: int | None = None
    epochs: int = 3

    def __post_init__(self) -> None:
        if not 1 <= self.samples <= MAX_N:
            raise ConfigError(f"samples must be 1 to 2**62, got {self.samples}")
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} must be positive, got {value}")
        if not (0 <= self.cache_bytes < math.inf and 0 <= self.cpu_s < math.inf):
            raise ConfigError(f"cache_bytes and cpu_s must be 0 or more, got {self.cache_bytes} and {self.cpu_s}")
        if self.shuffle not in SHUFFLES:
            raise ConfigError(f"unknown shuffle {self.shuffle!r}: use one of {', '.join(map(repr, SHUFFLES))}")
        if self.remainder not in REMAINDERS:
            raise ConfigError(f"unknown remainder {self.remainder!r}: use one of {', '.join(map(repr, REMAINDERS))}")
        if self.shuffle == "block" and self.read_rows > self.block_size:
            raise ConfigError(
                f"one read brings {self.read_rows} rows, and a block has {self.block_size}: the rest of each read "
                "would be thrown away. Make block_size a multiple of read_rows"
            )

    @property
    def nodes(self) -> int:
        """How many nodes the ranks need."""
        return -(-self.ranks // self.ranks_per_node)

    @property
    def ranks_here(self) -> int:
        """Ranks on a full node."""
        return min(self.ranks, self.ranks_per_node)

    @property
    def step_samples(self) -> int:
        """Samples of a rank in a step: fewer than ``batch_size`` where its share of a mini-epoch is smaller."""
        return max(1, min(self.batch_size, -(-self.samples // (self.ranks * self.mini_epochs))))

    @property
    def share(self) -> float:
        """The share of each epoch that a full node reads."""
        return self.ranks_here / self.ranks

    @property
    def out_bytes(self) -> int:
        """Of one sample in the batch."""
        return self.sample_bytes if self.delivered_bytes is None else self.delivered_bytes

    @property
    def manifest_bytes(self) -> int:
        """Of the manifest's file."""
        return round(self.samples * self.line_bytes)


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """What a plan takes for granted: figures measured on two cores of a shared EPYC machine. Measure your own.

    Attributes:
        rank_memory: private bytes of a rank's process: Python, torch without CUDA, this library; no model, no data. An
            import of both and 30 batches left 200 MB anonymous (smaps_rollup).
        worker_memory: private bytes of a worker forked from it, which shares what neither writes to: 16 to 26 MB after
            30 batches of a manifest of 200,000 rows. More rows add little: 7 MB for 10 million (docs/manifest.md).
        import_s: to import torch and this library: 1.3 + 0.25 s, with their files in the page cache.
        open_s: to open an indexed manifest of any length: 1 ms (docs/manifest.md).
        workers_s: to start a loader's workers, up to their first sample: 0.1 to 0.35 s for 1 to 4 of them.
        index_rate: bytes of a manifest indexed in a second: 1.3 GB/s (docs/manifest.md); storage may be slower.
        batch_s: that the consumer spends on a small batch: 64 samples of 1 KB came at 8,450 a second.
        hand_over_rate: bytes of large batches that a consumer takes and reads in a second: 6.4 GB/s.

    Raises:
        ConfigError: a number that is not positive.
    """

    rank_memory: int = 200_000_000
    worker_memory: int = 26_000_000
    import_s: float = 1.6
    open_s: float = 0.001
    workers_s: float = 0.35
    index_rate: float = 1.3e9
    batch_s: float = 0.00012
    hand_over_rate: float = 6.4e9

    def __post_init__(self) -> None:
        for field in fields(self):
            if not 0 < getattr(self, field.name) < math.inf:
                raise ConfigError(f"{field.name} must be positive, got {getattr(self, field.name)}")
