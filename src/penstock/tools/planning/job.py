"""The run to plan (`Job`), and assumptions about programs and machines (`Assumptions`)."""

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
    """A training run. Sizes are in bytes, times in seconds, rates in bytes per second.

    Args:
        samples: rows of the manifest.
        sample_bytes: mean size of a stored sample.
        delivered_bytes: size of a sample in the batch, such as 3 x 224 x 224; None for the stored size.
        line_bytes: size of a row in the manifest's file.
        ranks: number of ranks of the job.
        ranks_per_node: number of ranks on a node; the last node may have fewer. Plans are for a full node.
        batch_size: samples of a batch of one rank.
        drop_last: leave out incomplete batches.
        remainder: samples that do not divide evenly among ranks: "pad", "drop" or "uneven".
        mini_epochs: parts of an epoch, see `RankDataset`.
        shuffle, block_size, window, seed: the order.
        classes: number of labels, equally frequent, in a file sorted by class; None to ignore classes.
        step_s: duration of a training step without waiting for data; None: training takes no time.
        node_bandwidth, total_bandwidth: bandwidth of the storage for one node and for all; None for no limit.
        cache_bytes: cache of each node for samples: page cache or local copies.
        read_rows: rows of one read: 1 for single files and ranges, more for shards and pages.
        workers, prefetch: of each rank's loader.
        cpu_s: processor time of a worker for a sample.
        cores: cores of each node for workers; None for one per worker.
        epochs: number of epochs to plan, 1 or more.

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
                f"one read has {self.read_rows} rows, but a block only {self.block_size}: the rest of each read would "
                "be wasted. Make block_size a multiple of read_rows"
            )

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return -(-self.ranks // self.ranks_per_node)

    @property
    def ranks_here(self) -> int:
        """Number of ranks on a full node."""
        return min(self.ranks, self.ranks_per_node)

    @property
    def step_samples(self) -> int:
        """Samples of a rank in a step: fewer than ``batch_size`` if its share of a mini-epoch is smaller."""
        return max(1, min(self.batch_size, -(-self.samples // (self.ranks * self.mini_epochs))))

    @property
    def share(self) -> float:
        """The share of each epoch that a full node reads."""
        return self.ranks_here / self.ranks

    @property
    def out_bytes(self) -> int:
        """Bytes of a sample in the batch."""
        return self.sample_bytes if self.delivered_bytes is None else self.delivered_bytes

    @property
    def manifest_bytes(self) -> int:
        """Bytes of the manifest's file."""
        return round(self.samples * self.line_bytes)


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """Assumptions of a plan, measured on two cores of a shared EPYC machine. Replace them with your own measurements.

    Attributes:
        rank_memory: private bytes of a rank's process: Python, torch without CUDA, Penstock; no model, no data. The
            imports and 30 batches left 200 MB of anonymous memory (smaps_rollup).
        worker_memory: private bytes of a forked worker, without memory that it shares with the rank: 16 to 26 MB after
            30 batches of a manifest of 200,000 rows. More rows add little: 7 MB for 10 million (docs/manifest.md).
        import_s: time to import torch and Penstock: 1.3 + 0.25 s, with their files in the page cache.
        open_s: time to open an indexed manifest of any length: 1 ms (docs/manifest.md).
        workers_s: time to start a loader's workers, up to their first sample: 0.1 to 0.35 s for 1 to 4 workers.
        index_rate: bytes of a manifest indexed per second: 1.3 GB/s (docs/manifest.md); storage may be slower.
        batch_s: time of the main process for a small batch: 8,450 batches/s of 64 samples of 1 KB.
        hand_over_rate: bytes of large batches that the main process receives and reads per second: 6.4 GB/s.

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
