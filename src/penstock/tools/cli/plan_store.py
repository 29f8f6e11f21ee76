"""``penstock plan --shards``: the downloads of nodes from an object store, and their cost, as a table."""

from __future__ import annotations

import os
import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import typer

from penstock.errors import ConfigError
from penstock.tools.cli.manifest_options import byte_size, console, print_figures, print_json
from penstock.tools.cli.quantities import count
from penstock.wording import counted

if TYPE_CHECKING:
    from penstock.tools.cli.plan_options import JobOptions, StoreOptions
    from penstock.tools.planning.store import Fetched, StorePlan

__all__ = ["print_store"]


def print_store(store: StoreOptions, run: JobOptions, ranks: int | None, *, as_json: bool) -> None:
    """Print the downloads of each epoch, for a plain partition and for ``locality="node"``.

    Args:
        store: the shards, nodes and prices.
        run: the options of the job; the plan uses some of them.
        ranks: number of ranks; None for one per node.
        as_json: print one JSON object instead of a table.

    Raises:
        BadParameter: missing or invalid numbers.
        ConfigError: shards of unknown size.
    """
    from penstock.tools.planning.store import StoreJob, plan_store

    run.check_epochs()
    samples, sizes = _shards(store, run)
    try:
        job = StoreJob(
            samples=samples,
            sizes=sizes,
            nodes=store.nodes or 1,
            ranks=ranks,
            cache_bytes=run.cache,
            epochs=run.epochs,
            shuffle=str(run.shuffle),
            block_size=run.block_size,
            window=run.window,
            seed=run.seed,
        )
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    plan = plan_store(job)
    prices = {"gb_price": store.gb_price or 0.0, "request_price": store.request_price or 0.0}
    if as_json:
        ways = {
            name: [{**epoch._asdict(), "cost": epoch.cost(**prices)} for epoch in way]
            for name, way in plan.ways.items()
        }
        print_json({"store": {**asdict(plan), "ways": ways, **prices, **_order(run)}})
        return
    _print(plan, run, prices)


def _order(run: JobOptions) -> dict[str, Any]:
    block = {"block_size": run.block_size, "window": run.window} if run.shuffle == "block" else {}
    return {"shuffle": str(run.shuffle), **block, "seed": run.seed}


def _shards(store: StoreOptions, run: JobOptions) -> tuple[Any, Any]:
    """Return the number of samples and the bytes of each shard."""
    assert store.shards is not None
    if re.fullmatch(r"[0-9][0-9_.]*(e\+?[0-9]+)?[kmgtp]?", store.shards, re.IGNORECASE):
        shards = count(store.shards)
        if run.samples is None or run.sample_bytes is None:
            raise typer.BadParameter(f"--shards {store.shards}: add --samples N and --bytes SIZE of a sample")
        if not 1 <= shards <= run.samples:
            raise typer.BadParameter(f"--shards {store.shards}: use 1 shard or more, and at most one for each sample")
        bounds = np.arange(shards + 1, dtype=np.int64) * run.samples // shards
        return np.diff(bounds), np.diff(bounds) * run.sample_bytes
    if run.samples is not None or run.sample_bytes is not None:
        raise typer.BadParameter("--samples and --bytes: the shards define them: leave them out")
    return _shards_at(store.shards)


def _shards_at(place: str) -> tuple[Any, Any]:
    from penstock.datasets.mds import MDSDataset
    from penstock.datasets.shards import ShardDataset
    from penstock.opening import open
    from penstock.storage.urls import is_remote

    dataset = open(place, rank=0, world_size=1)
    if isinstance(dataset, ShardDataset):
        starts = np.asarray(dataset.shards.starts, np.int64)
        sizes = {number: os.path.getsize(url) for number, url in enumerate(dataset.shards.urls) if not is_remote(url)}
        sizes |= {shard.number: shard.source.size for shard in dataset.shards.stored()}
    elif isinstance(dataset, MDSDataset):
        starts = np.asarray(dataset.folder.starts, np.int64)
        sizes = {shard.number: shard.source.size for shard in dataset.folder.stored()}
    else:
        raise ConfigError(f"{place} has neither tar shards nor MDS shards: use --shards N with --samples and --bytes")
    if len(sizes) < len(starts) - 1:
        raise ConfigError(
            f"{place}: {counted(len(starts) - 1 - len(sizes), 'shard')} of unknown size in a store: "
            "use --shards N with --samples and --bytes"
        )
    return np.diff(starts), np.array([sizes[number] for number in range(len(starts) - 1)], np.int64)


def _print(plan: StorePlan, run: JobOptions, prices: dict[str, float]) -> None:
    from rich import box
    from rich.table import Table

    sizes = "".join(f", {name} {value:,}" for name, value in _order(run).items() if name in ("block_size", "window"))
    out = console()
    out.print(
        f"{counted(plan.shards, 'shard')} with {counted(plan.samples, 'sample')} ({byte_size(plan.bytes)}), "
        f"{counted(plan.ranks, 'rank')} on {counted(plan.nodes, 'node')}, a cache of {byte_size(plan.cache_bytes)} "
        f"each, {run.shuffle} shuffle{sizes}"
    )
    table = Table(title="Downloads of all nodes", title_justify="left", box=box.SIMPLE, pad_edge=False)
    costs = any(prices.values())
    for name in ("partition", "epoch", "bytes", "requests", "cache hits", *["cost"] * costs):
        table.add_column(name, justify="left" if name == "partition" else "right", no_wrap=True)
    for way, epochs in plan.ways.items():
        for number, epoch in enumerate(epochs[:2]):
            later = f"2 to {len(epochs)}, each" if len(epochs) > 2 else "2"
            found = _mean(epochs[1:]) if number else epoch
            cost = [f"{found.cost(**prices):,.2f}"] if costs else []
            cells = [byte_size(found.bytes), f"{found.requests:,}", f"{found.hits:.1%}", *cost]
            table.add_row("" if number else way, later if number else "1", *cells)
        if costs:
            total = sum(epoch.cost(**prices) for epoch in epochs)
            table.add_row("", "all", "", "", "", f"{total:,.2f}", style="bold")
    print_figures(table)
    out.print(
        "plain: each epoch splits all rows among all ranks. by node: locality='node'. Caches "
        "know the order, except LRU, which drops the least recently used. Not included: listing shards and reading "
        "their indexes."
    )


def _mean(epochs: tuple[Fetched, ...]) -> Fetched:
    count = len(epochs)
    sizes, requests, hits = zip(*epochs, strict=True)
    return type(epochs[0])(round(sum(sizes) / count), round(sum(requests) / count), sum(hits) / count)
