"""The options of ``penstock plan``: the run, assumptions about programs and machines, stores and packs."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from penstock.tools.cli.quantities import check_seed, count, size

if TYPE_CHECKING:
    from penstock.tools.planning import Assumptions, Job

__all__ = ["AssumedOptions", "JobOptions", "PackingOptions", "StoreOptions"]


def _size(name: str, help_text: str, **more: Any) -> Any:
    return typer.Option(name, parser=size, metavar="SIZE", help=help_text, **more)


def _count(name: str, help_text: str, **more: Any) -> Any:
    return typer.Option(name, parser=count, metavar="N", help=help_text, **more)


class _Shuffle(StrEnum):
    GLOBAL = "global"
    BLOCK = "block"
    NONE = "none"


class _Remainder(StrEnum):
    PAD = "pad"
    DROP = "drop"
    UNEVEN = "uneven"


_EPOCHS = 1000
_NAMES = {"sample_bytes": "bytes", "delivered_bytes": "delivered", "cache_bytes": "cache"}
_NAMES |= {"step_s": "step-ms", "cpu_s": "cpu-ms"}
_Made = TypeVar("_Made")
_MACHINE = {"rich_help_panel": "Machines"}
_PACKING = {"rich_help_panel": "Packing"}
_STORE = {"rich_help_panel": "Object store"}
_ORDER = {"rich_help_panel": "Order"}
_ASSUMED = {"rich_help_panel": "Assumptions (measured on a small machine; replace them by yours)"}


@dataclass(frozen=True)
class JobOptions:
    """The options of a run."""

    samples: Annotated[
        int | None,
        _count(
            "--samples", "Rows of the manifest: 1281167, 1.28M, 1e12.", show_default="required, except with --packing"
        ),
    ] = None
    sample_bytes: Annotated[
        int | None,
        _size("--bytes", "Mean size of a stored sample.", show_default="required, except with --packing"),
    ] = None
    delivered: Annotated[int | None, _size("--delivered", "Size of a sample in its batch; by default as stored.")] = (
        None
    )
    classes: Annotated[int | None, _count("--classes", "Number of classes, for a file sorted by class.")] = None
    ranks: Annotated[int, _count("--ranks", "Number of ranks of the job.")] = 1
    batch_size: Annotated[int, _count("--batch-size", "Samples in a batch of one rank.")] = 256
    step_ms: Annotated[
        float | None,
        typer.Option(
            "--step-ms",
            min=0.001,
            help="Milliseconds of a training step without waiting; by default loading is the limit.",
        ),
    ] = None
    epochs: Annotated[int, typer.Option("--epochs", help="Epochs to plan.")] = 3
    workers: Annotated[int, typer.Option("--workers", help="Workers of each rank's loader.")] = 4
    prefetch: Annotated[int, typer.Option("--prefetch", help="Batches in flight for each worker.")] = 2
    cpu_ms: Annotated[
        float, typer.Option("--cpu-ms", min=0, help="Processor time of a worker for a sample, in milliseconds.")
    ] = 2.5
    ranks_per_node: Annotated[int, typer.Option("--ranks-per-node", help="Most ranks on a node.", **_MACHINE)] = 8
    cores: Annotated[
        int | None,
        typer.Option("--cores", help="Cores of a node for workers; by default one for each worker.", **_MACHINE),
    ] = None
    cache: Annotated[
        int, _size("--cache", "Size of a node's cache of samples: page cache or local copies.", **_MACHINE)
    ] = 0
    node_bandwidth: Annotated[
        int | None,
        _size("--node-bandwidth", "Storage bandwidth of a node, per second; by default no limit.", **_MACHINE),
    ] = None
    total_bandwidth: Annotated[
        int | None, _size("--total-bandwidth", "Storage bandwidth of all nodes together.", **_MACHINE)
    ] = None
    read_rows: Annotated[
        int, _count("--read-rows", "Rows of one read: more than 1 for shards and pages.", **_MACHINE)
    ] = 1
    shuffle: Annotated[_Shuffle, typer.Option("--shuffle", help="Kind of shuffle.", **_ORDER)] = _Shuffle.GLOBAL
    block_size: Annotated[int, _count("--block-size", "Rows in a block.", **_ORDER)] = 1024
    window: Annotated[int, _count("--window", "Blocks that are mixed together.", **_ORDER)] = 64
    mini_epochs: Annotated[int, _count("--mini-epochs", "Mini-epochs (sub-epochs) of an epoch.", **_ORDER)] = 1
    remainder: Annotated[
        _Remainder, typer.Option("--remainder", help="Samples that do not divide evenly among ranks.", **_ORDER)
    ] = _Remainder.PAD
    drop_last: Annotated[bool, typer.Option("--drop-last", help="Leave out incomplete batches.", **_ORDER)] = False
    seed: Annotated[int, typer.Option("--seed", callback=check_seed, help="Seed of the order.", **_ORDER)] = 0
    line_bytes: Annotated[float, typer.Option("--line-bytes", help="Bytes of a row in the manifest.", **_ASSUMED)] = (
        38.0
    )

    def job(self) -> Job:
        """Return the job for `penstock.tools.planning`.

        Raises:
            BadParameter: a number outside its range, or a missing required one.
        """
        from penstock.tools.planning import Job

        if self.samples is None or self.sample_bytes is None:
            told = "a plan needs --samples N and --bytes SIZE, or --packing FILE and --capacity N"
            raise typer.BadParameter(told)
        self.check_epochs()
        renamed: dict[str, Any] = {
            "delivered_bytes": self.delivered,
            "batch_size": self.batch_size,
            "cache_bytes": self.cache,
        }
        renamed |= {"cpu_s": self.cpu_ms / 1000, "step_s": None if self.step_ms is None else self.step_ms / 1000}
        same = {field.name for field in fields(Job)} - set(renamed)
        values = {name: getattr(self, name) for name in same}
        values |= {"shuffle": str(self.shuffle), "remainder": str(self.remainder)}
        return _make(Job, values | renamed)

    def check_epochs(self) -> None:
        """Check the number of epochs.

        Raises:
            BadParameter: less than one epoch, or too many to plan one by one.
        """
        if not 1 <= self.epochs <= _EPOCHS:
            told = (
                f"--epochs {self.epochs}: use 1 to {_EPOCHS:,}, since each is planned by itself; later ones are alike"
            )
            raise typer.BadParameter(told)

    def check_layout(self) -> None:
        """Check ranks, batch size and epochs.

        Raises:
            BadParameter: a number outside its range.
        """
        self.check_epochs()
        for name, value in (("ranks", self.ranks), ("batch-size", self.batch_size)):
            if value < 1:
                raise typer.BadParameter(f"--{name} must be positive, got {value}")

    def share(self) -> dict[str, Any]:
        """Return the arguments of `penstock.Mixture` for the order and the partition."""
        block = {"block_size": self.block_size, "window": self.window} if self.shuffle is _Shuffle.BLOCK else {}
        order = {"shuffle": str(self.shuffle), "seed": self.seed, **block}
        dealt = {"mini_epochs": self.mini_epochs, "remainder": str(self.remainder)}
        return {**order, **dealt, "rank": 0, "world_size": self.ranks}


def _make(kind: Callable[..., _Made], values: dict[str, Any]) -> _Made:
    """Build an object from values.

    Raises:
        BadParameter: invalid values; the message names the options.
    """
    from penstock.errors import ConfigError

    try:
        return kind(**values)
    except ConfigError as error:
        names = re.compile(rf"\b(?:{'|'.join(values)})\b(?= must)|\b(?:{'|'.join(n for n in values if '_' in n)})\b")
        told = names.sub(lambda name: "--" + _NAMES.get(name[0], name[0]).replace("_", "-"), str(error))
        raise typer.BadParameter(told) from error


@dataclass(frozen=True)
class AssumedOptions:
    """The options for assumptions. A test compares the defaults with `penstock.tools.planning.Assumptions`."""

    rank_memory: Annotated[int, _size("--rank-memory", "Private memory of a rank's process.", **_ASSUMED)] = 200_000_000
    worker_memory: Annotated[int, _size("--worker-memory", "Private memory of a worker.", **_ASSUMED)] = 26_000_000
    import_s: Annotated[float, typer.Option("--import-s", help="Seconds to import torch and Penstock.", **_ASSUMED)] = (
        1.6
    )
    open_s: Annotated[float, typer.Option("--open-s", help="Seconds to open an indexed manifest.", **_ASSUMED)] = 0.001
    workers_s: Annotated[float, typer.Option("--workers-s", help="Seconds to start a rank's workers.", **_ASSUMED)] = (
        0.35
    )
    index_rate: Annotated[int, _size("--index-rate", "Bytes of a manifest indexed per second.", **_ASSUMED)] = (
        1_300_000_000
    )
    batch_s: Annotated[
        float, typer.Option("--batch-s", help="Seconds of the main process for a small batch.", **_ASSUMED)
    ] = 0.00012
    hand_over_rate: Annotated[
        int, _size("--hand-over-rate", "Bytes of large batches received and read per second.", **_ASSUMED)
    ] = 6_400_000_000

    def assumptions(self) -> Assumptions:
        """Return the assumptions for `penstock.tools.planning`.

        Raises:
            BadParameter: a number outside its range.
        """
        from penstock.tools.planning import Assumptions

        return _make(Assumptions, {field.name: getattr(self, field.name) for field in fields(self)})


@dataclass(frozen=True)
class StoreOptions:
    """The options for shards in an object store, and its prices."""

    shards: Annotated[
        str | None,
        typer.Option(
            "--shards",
            metavar="N|SHARDS",
            help="Plan downloads of shards from a store: their number, with --samples and --bytes; or their "
            "addresses, of tar archives or an MDS folder.",
            **_STORE,
        ),
    ] = None
    nodes: Annotated[
        int | None,
        typer.Option(
            "--nodes", min=1, help="Number of nodes of the job, each with a --cache.", show_default="1", **_STORE
        ),
    ] = None
    gb_price: Annotated[
        float | None,
        typer.Option("--gb-price", min=0, help="Price of downloading a GB.", show_default="0", **_STORE),
    ] = None
    request_price: Annotated[
        float | None,
        typer.Option("--request-price", min=0, help="Price of 1,000 GET requests.", show_default="0", **_STORE),
    ] = None

    @property
    def is_given(self) -> bool:
        """Whether to plan downloads from a store.

        Raises:
            BadParameter: options of a store, but no --shards.
        """
        if self.shards is None and (self.nodes, self.gb_price, self.request_price) != (None, None, None):
            raise typer.BadParameter(
                "--nodes, --gb-price and --request-price need --shards: add it, with a number or addresses of shards"
            )
        return self.shards is not None


@dataclass(frozen=True)
class PackingOptions:
    """The options of packing."""

    document_lengths: Annotated[
        Path | None,
        typer.Option("--packing", help="Compare packs of documents: an .npy file with the tokens of each.", **_PACKING),
    ] = None
    capacity: Annotated[
        int | None,
        typer.Option("--capacity", parser=count, metavar="N", help="Tokens of a pack.", **_PACKING),
    ] = None
    max_documents: Annotated[
        int | None,
        typer.Option("--max-documents", parser=count, metavar="N", help="Most documents of a pack.", **_PACKING),
    ] = None
    packs: Annotated[
        int | None, typer.Option("--packs", min=1, help="Packs in a batch of a rank.", show_default="8", **_PACKING)
    ] = None
    html: Annotated[Path | None, typer.Option("--html", help="Also write an HTML page, with --packing or sources.")] = (
        None
    )

    @property
    def is_given(self) -> bool:
        """Whether to compare packs.

        Raises:
            BadParameter: a required option of packing is missing.
        """
        if (self.document_lengths is None) != (self.capacity is None):
            raise typer.BadParameter("--packing FILE and --capacity N need each other")
        if self.document_lengths is None and (self.max_documents, self.packs) != (None, None):
            raise typer.BadParameter("--max-documents and --packs need --packing FILE: add it")
        return self.document_lengths is not None
