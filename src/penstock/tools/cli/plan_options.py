"""The options of ``penstock plan``: a run, what is assumed of programs and machines, and what is packed."""

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
_ASSUMED = {"rich_help_panel": "Assumptions (measured on a small machine; replace them by your own)"}


@dataclass(frozen=True)
class JobOptions:
    """A run, as the command line gives it."""

    samples: Annotated[
        int | None,
        _count("--samples", "Rows of the manifest: 1281167, 1.28M, 1e12.", show_default="required, but for --packing"),
    ] = None
    sample_bytes: Annotated[
        int | None,
        _size("--bytes", "Of a sample in storage, on average.", show_default="required, but for --packing"),
    ] = None
    delivered: Annotated[int | None, _size("--delivered", "Of a sample in its batch; by default as in storage.")] = None
    classes: Annotated[int | None, _count("--classes", "Different labels, in a file sorted by class.")] = None
    ranks: Annotated[int, _count("--ranks", "Ranks of the whole job.")] = 1
    batch_size: Annotated[int, _count("--batch-size", "Samples in a batch of one rank.")] = 256
    step_ms: Annotated[
        float | None,
        typer.Option(
            "--step-ms",
            min=0.001,
            help="Milliseconds of a training step without waiting; by default data sets the pace.",
        ),
    ] = None
    epochs: Annotated[int, typer.Option("--epochs", help="Epochs to plan.")] = 3
    workers: Annotated[int, typer.Option("--workers", help="Workers of each rank's loader.")] = 4
    prefetch: Annotated[int, typer.Option("--prefetch", help="Batches begun for each worker.")] = 2
    cpu_ms: Annotated[
        float, typer.Option("--cpu-ms", min=0, help="Milliseconds of a core that a worker needs for a sample.")
    ] = 2.5
    ranks_per_node: Annotated[int, typer.Option("--ranks-per-node", help="Ranks on a node, at most.", **_MACHINE)] = 8
    cores: Annotated[
        int | None, typer.Option("--cores", help="Cores of a node for workers; by default one for each.", **_MACHINE)
    ] = None
    cache: Annotated[
        int, _size("--cache", "Memory of a node for files of samples: page cache or local copies.", **_MACHINE)
    ] = 0
    node_bandwidth: Annotated[
        int | None, _size("--node-bandwidth", "Of storage in a second, for a node; by default no limit.", **_MACHINE)
    ] = None
    total_bandwidth: Annotated[
        int | None, _size("--total-bandwidth", "The same for all nodes together.", **_MACHINE)
    ] = None
    read_rows: Annotated[
        int, _count("--read-rows", "Rows that one read brings: more than 1 for shards and pages.", **_MACHINE)
    ] = 1
    shuffle: Annotated[_Shuffle, typer.Option("--shuffle", help="Kind of order.", **_ORDER)] = _Shuffle.GLOBAL
    block_size: Annotated[int, _count("--block-size", "Rows in a block.", **_ORDER)] = 1024
    window: Annotated[int, _count("--window", "Blocks that are mixed with one another.", **_ORDER)] = 64
    mini_epochs: Annotated[int, _count("--mini-epochs", "Parts of an epoch.", **_ORDER)] = 1
    remainder: Annotated[
        _Remainder, typer.Option("--remainder", help="What is done with the last samples.", **_ORDER)
    ] = _Remainder.PAD
    drop_last: Annotated[bool, typer.Option("--drop-last", help="Leave out batches that are not full.", **_ORDER)] = (
        False
    )
    seed: Annotated[
        int, typer.Option("--seed", callback=check_seed, help="Seed of the order that is looked at.", **_ORDER)
    ] = 0
    line_bytes: Annotated[float, typer.Option("--line-bytes", help="Bytes of a row in the manifest.", **_ASSUMED)] = (
        38.0
    )

    def job(self) -> Job:
        """What `penstock.tools.planning` takes.

        Raises:
            BadParameter: a number outside its range, or one that is needed and not there.
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
        """Refuse more epochs than are looked at one by one, with a BadParameter."""
        if not 1 <= self.epochs <= _EPOCHS:
            told = (
                f"--epochs {self.epochs}: 1 or more, and each is looked at, {_EPOCHS:,} at most; later ones are alike"
            )
            raise typer.BadParameter(told)

    def check_layout(self) -> None:
        """Refuse ranks, batches and epochs that make no sense, with a BadParameter."""
        self.check_epochs()
        for name, value in (("ranks", self.ranks), ("batch-size", self.batch_size)):
            if value < 1:
                raise typer.BadParameter(f"--{name} must be positive, got {value}")

    def share(self) -> dict[str, Any]:
        """What a `penstock.Mixture` takes: how sources are gone through, and how samples are dealt to ranks."""
        block = {"block_size": self.block_size, "window": self.window} if self.shuffle is _Shuffle.BLOCK else {}
        order = {"shuffle": str(self.shuffle), "seed": self.seed, **block}
        dealt = {"mini_epochs": self.mini_epochs, "remainder": str(self.remainder)}
        return {**order, **dealt, "rank": 0, "world_size": self.ranks}


def _make(kind: Callable[..., _Made], values: dict[str, Any]) -> _Made:
    """Of these values; BadParameter with the options' names in it if they make no sense."""
    from penstock.errors import ConfigError

    try:
        return kind(**values)
    except ConfigError as error:
        names = re.compile(rf"\b(?:{'|'.join(values)})\b(?= must)|\b(?:{'|'.join(n for n in values if '_' in n)})\b")
        told = names.sub(lambda name: "--" + _NAMES.get(name[0], name[0]).replace("_", "-"), str(error))
        raise typer.BadParameter(told) from error


@dataclass(frozen=True)
class AssumedOptions:
    """What is assumed; the defaults are those of `penstock.tools.planning.Assumptions`, and a test compares them."""

    rank_memory: Annotated[int, _size("--rank-memory", "Private, of a rank's process.", **_ASSUMED)] = 200_000_000
    worker_memory: Annotated[int, _size("--worker-memory", "Private, of a worker.", **_ASSUMED)] = 26_000_000
    import_s: Annotated[float, typer.Option("--import-s", help="To import torch and this library.", **_ASSUMED)] = 1.6
    open_s: Annotated[float, typer.Option("--open-s", help="To open an indexed manifest.", **_ASSUMED)] = 0.001
    workers_s: Annotated[float, typer.Option("--workers-s", help="To start a rank's workers.", **_ASSUMED)] = 0.35
    index_rate: Annotated[int, _size("--index-rate", "Of a manifest, indexed in a second.", **_ASSUMED)] = 1_300_000_000
    batch_s: Annotated[float, typer.Option("--batch-s", help="Of the consumer, for a small batch.", **_ASSUMED)] = (
        0.00012
    )
    hand_over_rate: Annotated[
        int, _size("--hand-over-rate", "Of large batches, taken and read in a second.", **_ASSUMED)
    ] = 6_400_000_000

    def assumptions(self) -> Assumptions:
        """What `penstock.tools.planning` takes.

        Raises:
            BadParameter: a number outside its range.
        """
        from penstock.tools.planning import Assumptions

        return _make(Assumptions, {field.name: getattr(self, field.name) for field in fields(self)})


@dataclass(frozen=True)
class StoreOptions:
    """Shards in an object store, and what that costs."""

    shards: Annotated[
        str | None,
        typer.Option(
            "--shards",
            metavar="N|SHARDS",
            help="Plan what is fetched of shards in a store: how many there are, with --samples and --bytes; or where "
            "they are, as tar archives or an MDS folder.",
            **_STORE,
        ),
    ] = None
    nodes: Annotated[
        int | None,
        typer.Option("--nodes", min=1, help="Nodes of the job, each with a --cache.", show_default="1", **_STORE),
    ] = None
    gb_price: Annotated[
        float | None,
        typer.Option("--gb-price", min=0, help="Of a GB that leaves the store.", show_default="0", **_STORE),
    ] = None
    request_price: Annotated[
        float | None,
        typer.Option("--request-price", min=0, help="Of 1,000 GET requests.", show_default="0", **_STORE),
    ] = None

    @property
    def is_given(self) -> bool:
        """Whether a store is planned; BadParameter where something else is said of one."""
        if self.shards is None and (self.nodes, self.gb_price, self.request_price) != (None, None, None):
            raise typer.BadParameter(
                "--nodes, --gb-price and --request-price are options of a store: give --shards N, or where they are"
            )
        return self.shards is not None


@dataclass(frozen=True)
class PackingOptions:
    """What is packed, as the command line gives it."""

    document_lengths: Annotated[
        Path | None,
        typer.Option("--packing", help="Tokens of each document, an .npy file: compare packs.", **_PACKING),
    ] = None
    capacity: Annotated[
        int | None,
        typer.Option("--capacity", parser=count, metavar="N", help="Tokens of a pack.", **_PACKING),
    ] = None
    max_documents: Annotated[
        int | None,
        typer.Option("--max-documents", parser=count, metavar="N", help="Documents of a pack.", **_PACKING),
    ] = None
    packs: Annotated[
        int | None, typer.Option("--packs", min=1, help="Packs in a batch of a rank.", show_default="8", **_PACKING)
    ] = None
    html: Annotated[Path | None, typer.Option("--html", help="Of packs or sources: write a page, too.")] = None

    @property
    def is_given(self) -> bool:
        """Whether packs are compared; BadParameter where only a part of what that takes is there."""
        if (self.document_lengths is None) != (self.capacity is None):
            raise typer.BadParameter("--packing FILE and --capacity N belong together")
        if self.document_lengths is None and (self.max_documents, self.packs) != (None, None):
            raise typer.BadParameter("--max-documents and --packs are options of packs: give --packing FILE, too")
        return self.document_lengths is not None
