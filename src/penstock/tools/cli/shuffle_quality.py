"""``penstock shuffle-quality``: how well orders mix a manifest, and what they read.

The measuring is `penstock.tools.quality`; this prints it, a table on standard output or with ``--json`` one JSON
object.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from penstock.errors import ConfigError, PenstockError
from penstock.tools.cli.data_options import DataOptions
from penstock.tools.cli.manifest_options import (
    Json,
    Reading,
    bar,
    console,
    given_options,
    print_figures,
    print_json,
    reading,
    spread,
)
from penstock.tools.cli.quantities import check_seed
from penstock.wording import counted

if TYPE_CHECKING:
    from penstock.manifest import Manifest
    from penstock.order import Nodes
    from penstock.order.permutation import Indices
    from penstock.tools.quality import Quality
    from penstock.tools.quality.measure import Labels, Make

__all__ = ["command"]


class _Kind(StrEnum):
    NONE = "none"
    BLOCK = "block"
    GLOBAL = "global"
    TORCH = "torch"


@reading
@spread("sources", DataOptions)
def command(
    context: typer.Context,
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE",
            help="Manifests, read as one in this order; or whatever profile takes; or MODULE:NAME, a data set with an "
            "order of its own or a loader, whose steps are measured.",
            show_default=False,
        ),
    ] = None,
    *,
    how: Reading,
    sources: DataOptions,
    kind: Annotated[
        list[_Kind] | None,
        typer.Option(
            "--kind",
            help="Measure this one (torch takes 8 bytes a row); may be repeated.  [default: none, block, global]",
        ),
    ] = None,
    buffer: Annotated[
        list[int] | None,
        typer.Option("--buffer", min=1, help="A shuffle buffer of so many rows, to compare; may be repeated."),
    ] = None,
    block_size: Annotated[
        int, typer.Option("--block-size", min=1, help="Rows in a block of the block shuffle.")
    ] = 1024,
    window: Annotated[int, typer.Option("--window", min=1, help="Blocks that are mixed with one another.")] = 64,
    nodes: Annotated[
        int | None,
        typer.Option(
            "--nodes",
            min=1,
            help="Measure the orders of locality='node', too, which deals blocks to so many nodes of --ranks.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", callback=check_seed, help="Seed of all orders.")] = 0,
    epochs: Annotated[
        int, typer.Option("--epochs", min=1, help="Epochs to measure, each compared with the next one.")
    ] = 2,
    batch: Annotated[int, typer.Option("--batch-size", min=1, help="Samples in a batch of one rank.")] = 256,
    ranks: Annotated[int, typer.Option("--ranks", min=1, help="Ranks that share the epoch.")] = 1,
    batches: Annotated[
        int, typer.Option("--batches", min=1, help="Batches looked at in each epoch, evenly spread; of steps, so many.")
    ] = 256,
    as_json: Json = False,
) -> None:
    """Measure how well orders mix a manifest: displacement, classes in a batch, repeats, and runs read.

    Large manifests are sampled: neither memory nor time depend on the number of rows. Of a program's data, or of a
    mixture by --source, measure the steps of its job: through filters, weights that change, and packs.
    """
    target = _target(files, sources)
    if target is not None or sources.is_given:
        if others := given_options(context, Reading, "buffer", "nodes"):
            raise typer.BadParameter(f"{', '.join(others)}: for manifests alone")
        given = _Steps(kind, seed, block_size, window, batch, ranks, epochs, batches)
        _measure_steps(context, target, sources, given, as_json=as_json)
        return
    if not files:
        raise typer.BadParameter("give FILE, MODULE:NAME or --source NAME=ROWS")
    from penstock.tools.quality import measure

    source = _source(list(files), how, bars=not as_json)
    layout = None if nodes is None else _layout(nodes, ranks)
    makers = _makers(source, kind, buffer, layout, seed=seed, block_size=block_size, window=window)
    found: dict[str, Quality] = {}
    for name, make in makers.items():
        with bar(name, show=not as_json) as show:
            found[name] = measure(
                make,
                batch_size=batch,
                ranks=ranks,
                epochs=epochs,
                labels=source.labels,
                batches=batches,
                window=block_size * window,
                progress=show,
            )
    if as_json:
        orders = [
            {"order": name, **asdict(quality), "rows_a_run": quality.rows_a_run} for name, quality in found.items()
        ]
        print_json({"rows": source.rows, "fingerprint": source.fingerprint, "seed": seed, "orders": orders})
        return
    out = console()
    some = next(iter(found.values()))
    each = "batch" if ranks == 1 else f"batch of each of {ranks:,} ranks"
    looked = f"{counted(some.batches, 'batch')} looked at in each epoch"
    out.print(f"{counted(source.rows, 'row')}, {batch:,} in a {each}, {looked}")
    if source.labels is None:
        out.print(f"no classes: {source.without}")
    _print(found)


class _Steps(NamedTuple):
    """What the command line says of steps."""

    kind: list[_Kind] | None
    seed: int
    block_size: int
    window: int
    batch_size: int
    ranks: int
    epochs: int
    batches: int


def _target(files: list[str] | None, sources: DataOptions) -> str | None:
    """Return the name of a program's data, if that is what is to be measured.

    Raises:
        BadParameter: files, too.
    """
    from penstock.tools.cli.profile_source import names_a_loader

    named = [file for file in files or [] if names_a_loader(file)]
    if sources.is_given and files:
        raise typer.BadParameter(f"--source describes data, and so does {files[0]}: give one of the two")
    if named and files is not None and len(files) > 1:
        raise typer.BadParameter(f"{named[0]}: give one data set or loader, and no files")
    return named[0] if named else None


def _measure_steps(
    context: typer.Context, target: str | None, sources: DataOptions, given: _Steps, *, as_json: bool
) -> None:
    """Measure the steps of a program's data, or of the sources on the command line, and print it."""
    from penstock.tools.cli.data_options import as_loader, with_rows
    from penstock.tools.cli.quality_steps import print_steps
    from penstock.tools.quality.steps import measure_steps

    rows: dict[str, int] = {}
    if target is None:
        loader, rows = sources.loader(given.batch_size, **_share(given))
    else:
        if others := given_options(context, "kind", "seed", "block_size", "window"):
            raise typer.BadParameter(f"{', '.join(others)}: {target} says it by itself")
        loader = as_loader(target, given.batch_size)
    ranks = given.ranks if given_options(context, "ranks") else None
    found = measure_steps(loader, epochs=given.epochs, ranks=ranks, steps=given.batches)
    if target is not None and given_options(context, "batch") and given.batch_size != found.batch_size:
        raise typer.BadParameter(f"--batch-size: the loader {target} has batches of {found.batch_size}")
    found = with_rows(found, rows) if rows else found
    if as_json:
        print_json({"steps": asdict(found)})
    else:
        print_steps(found)


def _share(given: _Steps) -> dict[str, Any]:
    """What a `penstock.Mixture` takes.

    Raises:
        BadParameter: several kinds of order, or torch's.
    """
    kinds = given.kind or [_Kind.GLOBAL]
    if len(kinds) > 1 or kinds[0] is _Kind.TORCH:
        raise typer.BadParameter("--kind: sources are gone through in one order: none, block or global")
    block = {"block_size": given.block_size, "window": given.window} if kinds[0] is _Kind.BLOCK else {}
    return {"shuffle": str(kinds[0]), "seed": given.seed, "rank": 0, "world_size": given.ranks, **block}


class _Source(NamedTuple):
    """What is put into an order: how many rows, whose, and of which classes; or why nothing is known of those."""

    rows: int
    fingerprint: str | None
    labels: Labels | None
    starts: Indices | None = None
    without: str = "this manifest has no labels that are numbers or texts (--label)"


def _source(files: list[str], how: Reading, *, bars: bool) -> _Source:
    """Return the samples of manifests, or of anything else that `penstock.open` takes and whose number is known.

    Raises:
        ConfigError: compressed shards, which are streams.
    """
    from penstock.opening import kind_of, open
    from penstock.samplers.identity import fingerprint_of

    usual = type(how)().arguments()
    given = {name: value for name, value in how.arguments().items() if value != usual[name]}
    names = [Path(name) if os.path.isdir(name) else name for name in files]  # a text may have braces
    try:
        kind = kind_of(names, **given)
    except PenstockError:
        kind = "manifests"  # of any name; what is wrong with it is said when it is opened
    if kind == "manifests" or kind.startswith("a folder of"):
        manifest = how.open(files, bars=bars)
        return _Source(len(manifest), manifest.fingerprint, _labels(manifest))
    if kind == "compressed shards":
        raise ConfigError(
            f"{', '.join(files)}: compressed shards are streams, of which nobody knows the length: unpack them first"
        )
    samples: Any = open(names if len(names) > 1 else names[0], rank=0, world_size=1)
    starts = samples.plan.source.starts if kind in ("shards", "MDS folders") else None
    return _Source(
        len(samples), fingerprint_of(samples), None, starts, f"those of {kind} are in the samples, which are not read"
    )


def _layout(nodes: int, ranks: int) -> Nodes:
    """Return how ranks lie on nodes.

    Raises:
        BadParameter: not equally many on each.
    """
    from penstock.order import Nodes

    if ranks % nodes:
        raise typer.BadParameter(f"--nodes {nodes}: give a number of --ranks that is a multiple of it, not {ranks}")
    return Nodes(nodes, ranks)


def _makers(
    source: _Source,
    kinds: list[_Kind] | None,
    buffers: list[int] | None,
    layout: Nodes | None,
    *,
    seed: int,
    block_size: int,
    window: int,
) -> dict[str, Make]:
    """What makes the order of an epoch, by the order's name."""
    n = source.rows
    from penstock.hashing import derive_key
    from penstock.tools.quality import ShuffleBuffer, TableOrder

    def ours(kind: str) -> Make:
        from penstock.order import make_order

        return lambda epoch: _invertible(
            make_order(kind, n, seed=seed, epoch=epoch, block_size=block_size, window=window)
        )

    def by_node(kind: str, layout: Nodes) -> Make:
        from penstock.order import NodeShuffle

        sizes = {"block_size": block_size, "window": window} if kind == "block" else {}
        return lambda epoch: NodeShuffle(n, layout, seed=seed, epoch=epoch, kind=kind, starts=source.starts, **sizes)

    def torchs(epoch: int) -> TableOrder:
        from penstock.samplers.orders import TorchOrder

        return TableOrder(TorchOrder(n, seed, epoch)[:])

    def buffered(size: int) -> Make:
        return lambda epoch: ShuffleBuffer(n, size, derive_key(seed, epoch, "buffer"))

    makers: dict[str, Make] = {}
    for kind in kinds or (_Kind.NONE, _Kind.BLOCK, _Kind.GLOBAL):
        name = f"block, {block_size} x {window}" if kind is _Kind.BLOCK else str(kind)
        makers[name] = torchs if kind is _Kind.TORCH else ours(kind)
        if layout is not None and kind in (_Kind.BLOCK, _Kind.GLOBAL):
            makers[f"{name}, by node"] = by_node(str(kind), layout)
    for size in buffers or ():
        makers[f"buffer of {size:,} (peer)"] = buffered(size)
    return makers


def _invertible(order: Any) -> Any:
    """Orders that are registered by users may have no inverse: then they are listed."""
    import numpy as np

    from penstock.tools.quality import TableOrder

    return order if hasattr(order, "inverse") else TableOrder(order[np.arange(len(order))])


def _labels(manifest: Manifest) -> Labels | None:
    """The labels of rows, read as they are asked for; None where there are none to count."""
    import pyarrow as pa

    if "label" not in manifest.columns:
        return None
    kind = manifest.schema.field("label").type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_string(kind)):
        return None
    return lambda rows: manifest.take(rows).column("label").to_numpy(zero_copy_only=False)


def _print(found: dict[str, Quality]) -> None:
    """The table of orders: what was measured, and beside it what a random order has."""
    from rich import box
    from rich.table import Table

    some = next(iter(found.values()))
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("order", style="bold", no_wrap=True)
    names = ["displacement"]
    names += [] if some.classes is None else ["classes a batch", "5th percentile"]
    names += [] if some.overlap is None else ["pairs again", "overlap"]
    for name in [*names, "window", "runs read", "rows a run"]:
        table.add_column(name, justify="right", no_wrap=True)
    for name, quality in found.items():
        streams = quality.runs == 1 and quality.window == quality.rows
        reads = ["streams" if streams else f"{quality.window:,}", f"{quality.runs:,.0f}", f"{quality.rows_a_run:,.1f}"]
        table.add_row(name, *_mixing(quality), *reads)
    table.add_section()
    chance = ["0.3333"]
    chance += [] if some.classes_random is None else [f"{some.classes_random:,.1f}", ""]
    chance += [] if some.overlap is None else [f"{some.pairs_random:.2g}", f"{some.overlap_random:,.1f}"]
    table.add_row("expected at random", *chance, "", "", "", style="dim")
    print_figures(table)


def _mixing(quality: Quality) -> list[str]:
    """The cells that say how well an order mixes."""
    cells = [f"{quality.displacement:.4f}"]
    if quality.classes is not None and quality.classes_low is not None:
        cells += [f"{quality.classes:,.1f}", f"{quality.classes_low:,.0f}"]
    if quality.pairs_again is not None and quality.overlap is not None:
        cells += [f"{quality.pairs_again:.2g}", f"{quality.overlap:,.1f}"]
    return cells
