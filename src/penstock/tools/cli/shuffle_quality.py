"""``penstock shuffle-quality``: measure how well orders mix a manifest, and their reads.

The measurement is in `penstock.tools.quality`. This module prints a table to standard output, or one JSON object with
``--json``.
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
            help="Manifests, read as one in this order; or any source of profile; or MODULE:NAME, a dataset with its "
            "own order or a loader, to measure the steps of its job.",
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
            help="Measure this one (torch takes 8 bytes a row); repeatable.  [default: none, block, global]",
        ),
    ] = None,
    buffer: Annotated[
        list[int] | None,
        typer.Option("--buffer", min=1, help="Compare a shuffle buffer of so many rows; repeatable."),
    ] = None,
    block_size: Annotated[
        int, typer.Option("--block-size", min=1, help="Rows in a block of the block shuffle.")
    ] = 1024,
    window: Annotated[int, typer.Option("--window", min=1, help="Blocks that are mixed together.")] = 64,
    locality: Annotated[bool, typer.Option("--locality", help="Also measure locality='node'.")] = False,
    seed: Annotated[int, typer.Option("--seed", callback=check_seed, help="Seed of all orders.")] = 0,
    epochs: Annotated[
        int, typer.Option("--epochs", min=1, help="Epochs to measure, each compared with the next one.")
    ] = 2,
    batch: Annotated[int, typer.Option("--batch-size", min=1, help="Samples in a batch of one rank.")] = 256,
    ranks: Annotated[int, typer.Option("--ranks", min=1, help="Number of ranks of the job.")] = 1,
    batches: Annotated[
        int, typer.Option("--batches", min=1, help="Batches to measure in each epoch, spread evenly; for a job, steps.")
    ] = 256,
    as_json: Json = False,
) -> None:
    """Measure how well orders mix a manifest: displacement, classes in a batch, repeats, and runs read.

    Large manifests are sampled, so memory and time do not depend on the number of rows. For a program's data, or a
    mixture of --source, measure the steps of its job, with filters, changing weights and packs.
    """
    target = _target(files, sources)
    if target is not None or sources.is_given:
        if others := given_options(context, Reading, "buffer", "locality"):
            raise typer.BadParameter(f"{', '.join(others)}: only for manifests: leave them out")
        given = _Steps(kind, seed, block_size, window, batch, ranks, epochs, batches)
        _measure_steps(context, target, sources, given, as_json=as_json)
        return
    if not files:
        raise typer.BadParameter("add FILE, MODULE:NAME or --source NAME=ROWS")
    from penstock.tools.quality import measure

    source = _source(list(files), how, bars=not as_json)
    makers = _makers(source, kind, buffer, locality=locality, seed=seed, block_size=block_size, window=window)
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
    each = "batch" if ranks == 1 else f"batch on each of {ranks:,} ranks"
    looked = f"{counted(some.batches, 'batch')} measured in each epoch"
    out.print(f"{counted(source.rows, 'row')}, {batch:,} in a {each}, {looked}")
    if source.labels is None:
        out.print(f"no classes: {source.without}")
    _print(found)


class _Steps(NamedTuple):
    """The options for measuring steps."""

    kind: list[_Kind] | None
    seed: int
    block_size: int
    window: int
    batch_size: int
    ranks: int
    epochs: int
    batches: int


def _target(files: list[str] | None, sources: DataOptions) -> str | None:
    """Return the name of a program's data, or None if files or sources are measured.

    Raises:
        BadParameter: several of these are given.
    """
    from penstock.tools.cli.profile_source import names_a_loader

    named = [file for file in files or [] if names_a_loader(file)]
    if sources.is_given and files:
        raise typer.BadParameter(f"--source and {files[0]} both describe data: use one of them")
    if named and files is not None and len(files) > 1:
        raise typer.BadParameter(f"{named[0]}: use one dataset or loader, without files")
    return named[0] if named else None


def _measure_steps(
    context: typer.Context, target: str | None, sources: DataOptions, given: _Steps, *, as_json: bool
) -> None:
    """Measure and print the steps of a program's data, or of the sources on the command line."""
    from penstock.tools.cli.data_options import as_loader, with_rows
    from penstock.tools.cli.quality_steps import print_steps
    from penstock.tools.quality.steps import measure_steps

    rows: dict[str, int] = {}
    if target is None:
        loader, rows = sources.loader(given.batch_size, **_share(given))
    else:
        if others := given_options(context, "kind", "seed", "block_size", "window"):
            raise typer.BadParameter(f"{', '.join(others)}: {target} defines them: leave them out")
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
    """Return the arguments of `penstock.Mixture`.

    Raises:
        BadParameter: several kinds of order, or torch's kind.
    """
    kinds = given.kind or [_Kind.GLOBAL]
    if len(kinds) > 1 or kinds[0] is _Kind.TORCH:
        raise typer.BadParameter("--kind: sources have one order: use one of none, block and global")
    block = {"block_size": given.block_size, "window": given.window} if kinds[0] is _Kind.BLOCK else {}
    return {"shuffle": str(kinds[0]), "seed": given.seed, "rank": 0, "world_size": given.ranks, **block}


class _Source(NamedTuple):
    """The rows to order: fingerprint, and labels or the reason why they are unknown."""

    rows: int
    fingerprint: str | None
    labels: Labels | None
    without: str = "this manifest has no labels that are numbers or texts (--label)"


def _source(files: list[str], how: Reading, *, bars: bool) -> _Source:
    """Return the samples of manifests, or of another source of `penstock.open` with a known length.

    Raises:
        ConfigError: compressed shards, which are streams.
    """
    from penstock.opening import kind_of, open
    from penstock.samplers.identity import fingerprint_of

    usual = type(how)().arguments()
    given = {name: value for name, value in how.arguments().items() if value != usual[name]}
    names = [Path(name) if os.path.isdir(name) else name for name in files]  # braces in a str would be a pattern
    try:
        kind = kind_of(names, **given)
    except PenstockError:
        kind = "manifests"  # opening it reports the error
    if kind == "manifests" or kind.startswith("a folder of"):
        manifest = how.open(files, bars=bars)
        return _Source(len(manifest), manifest.fingerprint, _labels(manifest))
    if kind == "compressed shards":
        raise ConfigError(f"{', '.join(files)}: compressed shards are streams of unknown length: unpack them first")
    samples: Any = open(names if len(names) > 1 else names[0], rank=0, world_size=1)
    return _Source(
        len(samples),
        fingerprint_of(samples),
        None,
        f"the labels of {kind} are inside the samples, which are not read",
    )


def _makers(
    source: _Source,
    kinds: list[_Kind] | None,
    buffers: list[int] | None,
    *,
    locality: bool,
    seed: int,
    block_size: int,
    window: int,
) -> dict[str, Make]:
    """Return, by name, functions that build an epoch's order."""
    n = source.rows
    from penstock.hashing import derive_key
    from penstock.tools.quality import ShuffleBuffer, TableOrder

    def ours(kind: str) -> Make:
        from penstock.order import make_order

        return lambda epoch: _invertible(
            make_order(kind, n, seed=seed, epoch=epoch, block_size=block_size, window=window)
        )

    def by_node(kind: str) -> Make:
        from penstock.order import NodeShuffle

        size = block_size if kind == "block" else None
        return lambda epoch: NodeShuffle(n, seed=seed, epoch=epoch, block_size=size)

    def torchs(epoch: int) -> TableOrder:
        import numpy as np

        from penstock.samplers.orders import epoch_order

        return TableOrder(np.asarray(epoch_order("torch", {}, n, seed, epoch)))

    def buffered(size: int) -> Make:
        return lambda epoch: ShuffleBuffer(n, size, derive_key(seed, epoch, "buffer"))

    makers: dict[str, Make] = {}
    for kind in kinds or (_Kind.NONE, _Kind.BLOCK, _Kind.GLOBAL):
        name = f"block, {block_size} x {window}" if kind is _Kind.BLOCK else str(kind)
        makers[name] = torchs if kind is _Kind.TORCH else ours(kind)
        if locality and kind in (_Kind.BLOCK, _Kind.GLOBAL):
            makers[f"{name}, by node"] = by_node(str(kind))
    for size in buffers or ():
        makers[f"buffer of {size:,} (peer)"] = buffered(size)
    return makers


def _invertible(order: Any) -> Any:
    """Return an order with an inverse. An order of the user's own without an inverse is stored as a table."""
    import numpy as np

    from penstock.tools.quality import TableOrder

    return order if hasattr(order, "inverse") else TableOrder(order[np.arange(len(order))])


def _labels(manifest: Manifest) -> Labels | None:
    """Return a function that reads the labels of rows; None if there are no countable labels."""
    import pyarrow as pa

    if "label" not in manifest.columns:
        return None
    kind = manifest.schema.field("label").type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_string(kind)):
        return None
    return lambda rows: manifest.take(rows).column("label").to_numpy(zero_copy_only=False)


def _print(found: dict[str, Quality]) -> None:
    """Print the table of orders, with the values of a random order in the last line."""
    from rich import box
    from rich.table import Table

    some = next(iter(found.values()))
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("order", style="bold", no_wrap=True)
    names = ["displacement"]
    names += [] if some.classes is None else ["classes per batch", "5th percentile"]
    names += [] if some.overlap is None else ["repeated pairs", "overlap"]
    for name in [*names, "window", "runs read", "rows per run"]:
        table.add_column(name, justify="right", no_wrap=True)
    for name, quality in found.items():
        reads = [
            "streams" if quality.streams else f"{quality.window:,}",
            f"{quality.runs:,.0f}",
            f"{quality.rows_a_run:,.1f}",
        ]
        table.add_row(name, *_mixing(quality), *reads)
    table.add_section()
    chance = ["0.3333"]
    chance += [] if some.classes_random is None else [f"{some.classes_random:,.1f}", ""]
    chance += [] if some.overlap is None else [f"{some.pairs_random:.2g}", f"{some.overlap_random:,.1f}"]
    table.add_row("expected at random", *chance, "", "", "", style="dim")
    print_figures(table)


def _mixing(quality: Quality) -> list[str]:
    """Return the cells about mixing for a row of the table."""
    cells = [f"{quality.displacement:.4f}"]
    if quality.classes is not None and quality.classes_low is not None:
        cells += [f"{quality.classes:,.1f}", f"{quality.classes_low:,.0f}"]
    if quality.pairs_again is not None and quality.overlap is not None:
        cells += [f"{quality.pairs_again:.2g}", f"{quality.overlap:,.1f}"]
    return cells
