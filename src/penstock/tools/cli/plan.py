"""``penstock plan``: estimate the needs of a training run.

The arithmetic is in `penstock.tools.planning`. This module prints tables to standard output, or one JSON object with
``--json``, and draws a plot with ``--plot``.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.tools.cli.data_options import DataOptions
from penstock.tools.cli.manifest_options import (
    Json,
    byte_size,
    console,
    duration,
    given_options,
    pairs,
    print_figures,
    print_json,
    spread,
)
from penstock.tools.cli.plan_options import AssumedOptions, JobOptions, PackingOptions, StoreOptions
from penstock.tools.cli.plots import check_plot
from penstock.tools.cli.quantities import count
from penstock.wording import counted

if TYPE_CHECKING:
    from rich.table import Table

    from penstock.tools.planning import Epoch, Job, Plan, TokenBatches
    from penstock.tools.planning.data import DataPlan

__all__ = ["command"]

_STORE = {"samples", "sample_bytes", "ranks", "epochs", "cache", "shuffle", "block_size", "window", "seed"}
"""Options of a job that the plan of a store also uses."""

_LAYOUT = {"ranks", "batch_size", "epochs"}
_SHARE = {"drop_last", "shuffle", "block_size", "window", "mini_epochs", "remainder", "seed"}
"""Options of a job that a program's dataset sets itself."""


@spread("assumed", AssumedOptions)
@spread("run", JobOptions)
@spread("packing", PackingOptions)
@spread("store", StoreOptions)
@spread("sources", DataOptions)
def command(
    context: typer.Context,
    data: Annotated[
        str | None,
        typer.Argument(
            metavar="MODULE:NAME",
            help="A dataset with its own order, or a loader, in a module or .py file: plan its use in a run.",
            show_default=False,
        ),
    ] = None,
    *,
    run: JobOptions,
    sources: DataOptions,
    assumed: AssumedOptions,
    packing: PackingOptions,
    store: StoreOptions,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw the plan into this file; needs matplotlib.")] = None,
    lengths: Annotated[
        Path | None, typer.Option("--lengths", help="An .npy file with the tokens of each sample, for --max-tokens.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", parser=count, metavar="N", help="Also plan batches of so many tokens.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Plan a run: batches, memory, cache, bottleneck, shuffle quality, start-up and resume.

    No data is read, and nothing is measured except the order itself, at its real size. With --packing: compute the
    padding of packs and their cost for ranks. With --source, or a program's dataset: compute a run's use of each
    source, with filters and changing weights. With --shards: compute the downloads from an object store.
    """
    if store.is_given:
        from penstock.tools.cli.plan_store import print_store

        if data is not None or sources.is_given or packing.is_given:
            raise typer.BadParameter("--shards plans only the downloads of these shards: leave other data out")
        others = given_options(context, JobOptions, AssumedOptions, but=_STORE)
        if plot is not None or packing.html is not None or lengths is not None or max_tokens is not None or others:
            told = ", ".join(others) or "--plot, --html, --lengths and --max-tokens"
            raise typer.BadParameter(f"{told}: a plan with --shards does not use them: leave them out")
        print_store(store, run, _ranks(context, run), as_json=as_json)
        return
    if plot is not None:
        from penstock.tools.cli.plan_plot import check_matplotlib

        check_matplotlib()  # fail now, not after all other work
        check_plot(plot)
    if packing.is_given:
        from penstock.tools.cli.plan_packing import print_packing

        if data is not None or sources.is_given:
            raise typer.BadParameter("--packing only compares packs: leave the data out, or plan it separately")
        if lengths is not None or max_tokens is not None:
            raise typer.BadParameter(
                "--lengths and --max-tokens are for the plan of a job: leave them out with --packing"
            )
        others = given_options(context, JobOptions, AssumedOptions, but={"ranks"})
        print_packing(packing, _ranks(context, run), others, plot, as_json=as_json)
        return
    if data is not None or sources.is_given:
        planned = _data_plan(context, data, sources, run)
        if lengths is not None or max_tokens is not None:
            raise typer.BadParameter("--lengths and --max-tokens are for a plan without sources: leave them out")
        _show_data(planned, run, assumed, packing.html, plot, as_json=as_json)
        return
    if packing.html is not None:
        raise typer.BadParameter("--html needs --packing FILE, --source, or the dataset of a program")
    _plan_job(run, assumed, lengths, max_tokens, plot, as_json=as_json)


def _plan_job(
    run: JobOptions,
    assumed: AssumedOptions,
    lengths: Path | None,
    max_tokens: int | None,
    plot: Path | None,
    *,
    as_json: bool,
) -> None:
    from penstock.tools.planning import make_plan

    job, assumptions = run.job(), assumed.assumptions()
    batches = _token_batches(job, lengths, max_tokens)
    plan = make_plan(job, assumptions)
    if as_json:
        more = {} if batches is None else {"token_batches": asdict(batches)}
        print_json({**_report(plan), **more})
    else:
        _print(plan)
        if batches is not None:
            console().print(pairs(f"Batches of {batches.max_tokens:,} tokens", _token_rows(batches)))
    if plot is not None:
        from penstock.tools.cli.plan_plot import draw

        draw(plot, plan)


def _report(plan: Plan) -> dict[str, Any]:
    return {**asdict(plan), "nodes": plan.job.nodes, "check": {**asdict(plan.check), "ok": plan.check.ok}}


def _ranks(context: typer.Context, run: JobOptions) -> int | None:
    """Return the number of ranks if given on the command line, else None."""
    return run.ranks if given_options(context, "ranks") else None


def _data_plan(context: typer.Context, data: str | None, sources: DataOptions, run: JobOptions) -> DataPlan:
    """Return the plan of a program's data, or of the sources on the command line.

    Raises:
        BadParameter: both are given, or options that the data itself sets.
    """
    from penstock.tools.cli.data_options import as_loader, with_rows
    from penstock.tools.planning.data import data_plan

    run.check_layout()
    if data is None:
        if run.samples is not None:
            raise typer.BadParameter("--samples: the sources determine the samples of an epoch: leave it out")
        others = given_options(context, JobOptions, AssumedOptions, but=_LAYOUT | _SHARE)
        if others and run.sample_bytes is None:
            raise typer.BadParameter(f"{', '.join(others)}: the plan of the job needs --bytes SIZE, too")
        loader, rows = sources.loader(run.batch_size, drop_last=run.drop_last, **run.share())
        return with_rows(data_plan(loader, epochs=run.epochs), rows)
    if sources.is_given:
        raise typer.BadParameter(f"--source and {data} both describe data: use one of them")
    if others := given_options(context, JobOptions, AssumedOptions, but=_LAYOUT):
        raise typer.BadParameter(
            f"{', '.join(others)}: for {data} only the use of its sources is planned: leave them out"
        )
    planned = data_plan(as_loader(data, run.batch_size), epochs=run.epochs, ranks=_ranks(context, run))
    if given_options(context, "batch_size") and planned.batch_size != run.batch_size:
        raise typer.BadParameter(f"--batch-size: the loader {data} has batches of {planned.batch_size}")
    return planned


def _show_data(
    planned: DataPlan,
    run: JobOptions,
    assumed: AssumedOptions,
    html: Path | None,
    plot: Path | None,
    *,
    as_json: bool,
) -> None:
    """Print a run's use of its data, and the plan of the job if the size of a sample is known."""
    from penstock.tools.cli.plan_data import draw_data, print_data, write_page
    from penstock.tools.cli.plan_page import check_page
    from penstock.tools.planning import make_plan

    check_page(html)
    plan = None
    if run.sample_bytes is not None:
        plan = make_plan(replace(run, samples=planned.samples).job(), assumed.assumptions())
    if as_json:
        print_json({"data": asdict(planned), **({} if plan is None else _report(plan))})
    else:
        print_data(planned)
        if plan is not None:
            _print(plan)
    if html is not None:
        write_page(html, planned)
    if plot is not None:
        draw_data(plot, planned)


def _print(plan: Plan) -> None:
    job = plan.job
    out = console()
    size = byte_size(job.samples * job.sample_bytes)
    out.print(
        f"{counted(job.samples, 'sample')} of {byte_size(job.sample_bytes)} ({size}), {counted(job.ranks, 'rank')} on "
        f"{counted(job.nodes, 'node')}, {job.shuffle} shuffle"
    )
    out.print(pairs("An epoch", _epoch_rows(plan)))
    out.print(pairs("Memory", _memory_rows(plan)))
    out.print(pairs("Time", _time_rows(plan)))
    if plan.needs.samples_per_s is not None:
        out.print(pairs("Needs of training, per node", _need_rows(plan)))
    print_figures(_rates(plan))
    print_figures(_shuffles(plan))
    for note in plan.notes:
        out.print(note)
    out.print("Process memory, start-up and hand-over are assumptions from a small machine: see --help.")


def _token_batches(job: Job, lengths: Path | None, max_tokens: int | None) -> TokenBatches | None:
    """Return the batches within a token budget, if both options are given."""
    from penstock.tools.planning import token_batches

    if lengths is None or max_tokens is None:
        if lengths is not None or max_tokens is not None:
            raise typer.BadParameter("--lengths FILE and --max-tokens N need each other")
        return None
    found = token_batches(lengths, max_tokens, ranks=job.ranks, remainder=job.remainder)
    if found.samples + found.too_long != job.samples:
        told = f"{lengths} has {found.samples + found.too_long:,} lengths, but --samples is {job.samples:,}"
        raise typer.BadParameter(told)
    return found


def _token_rows(found: TokenBatches) -> list[tuple[str, str]]:
    samples = found.samples / found.batches if found.batches else 0
    rows = [
        ("batches per rank", f"{found.batches_rank:,} of {found.batches:,}, with {samples:,.1f} samples on average"),
        ("padding", f"{found.padding:.2%} at most, with {counted(found.classes, 'class')} of lengths"),
        ("budget", f"{found.use:.1%} used by tokens of samples"),
    ]
    if found.too_long:
        rows.append(("too long", f"{counted(found.too_long, 'sample')}, left out of this plan"))
    return rows


def _time(seconds: float) -> str:
    """Return a time as text, like `duration`, but in hours or days from one hour up."""
    if seconds < 3600:
        return duration(seconds)
    hours = seconds / 3600
    return f"{hours:,.1f} h" if hours < 48 else f"{hours / 24:,.1f} days"


def _epoch_rows(plan: Plan) -> list[tuple[str, str]]:
    job, dealing, check = plan.job, plan.dealing, plan.check
    parts = f" in {job.mini_epochs:,} mini-epochs of {dealing.batches_mini_epoch:,}" if job.mini_epochs > 1 else ""
    last = f"the last one with {counted(dealing.last_batch, 'sample')}"
    rows = [("batches per rank", f"{dealing.batches:,}{parts}, {last}")]
    if dealing.batches_fewest < dealing.batches:
        rows.append(("fewest per rank", f"{dealing.batches_fewest:,}"))
    if dealing.padded > job.samples:
        rows.append(("repeated", f"each sample, {dealing.padded / job.samples + 1:,.1f} times in total"))
    else:
        rows.append(("repeated", counted(dealing.padded, "sample")))
    rows.append(("left out", counted(dealing.dropped + dealing.dropped_last, "sample")))
    counts = "counts differ by one at most" if job.remainder == "uneven" else "equal counts"
    disjoint = "disjoint before padding" if dealing.padded else "disjoint"
    held = f"{disjoint}, complete, {counts}" if check.ok else "FAILED"
    looked = f"{counted(check.ranks, 'rank')}, {counted(check.samples, 'row')} of the real order"
    rows.append(("checked", f"{looked}: {held}"))
    return rows


def _memory_rows(plan: Plan) -> list[tuple[str, str]]:
    job, memory = plan.job, plan.memory
    return [
        ("rank", f"{byte_size(memory.rank)} private, without the model"),
        ("worker", f"{byte_size(memory.worker)} private; {job.workers} per rank"),
        ("ring", f"{byte_size(memory.ring)} per rank: {memory.slots} slots of {byte_size(memory.slot_bytes)}"),
        ("node", f"{byte_size(memory.node)} for {counted(job.ranks_here, 'rank')}"),
        ("mapped", f"{byte_size(memory.node_mapped)} per node, reclaimed when memory is short"),
        ("index on disk", f"{byte_size(memory.index_bytes)} beside a manifest of {byte_size(memory.manifest_bytes)}"),
    ]


def _time_rows(plan: Plan) -> list[tuple[str, str]]:
    start = plan.start_up
    return [
        ("index", f"{_time(start.index)}, once"),
        ("start", f"{_time(start.start)} to the first batch, {_time(start.first_batch)} of it for the batch"),
        ("resume", f"{_time(start.resume)}, anywhere in an epoch, on any number of ranks"),
        ("resume by replay", f"{_time(start.replay)} more on average, for loaders that must read samples again"),
    ]


def _need_rows(plan: Plan) -> list[tuple[str, str]]:
    needs = plan.needs
    assert needs.samples_per_s is not None
    assert needs.workers is not None
    assert needs.bandwidth is not None
    assert needs.bandwidth_cached is not None
    assert needs.total_bandwidth is not None
    total = f"{byte_size(needs.total_bandwidth)}/s for all nodes"
    cached = f"{byte_size(needs.bandwidth_cached)}/s in epoch {plan.job.epochs}"
    return [
        ("samples", f"{needs.samples_per_s:,.0f}/s"),
        ("bandwidth", f"{byte_size(needs.bandwidth)}/s in the first epoch, {cached}; {total}"),
        ("cores", f"{needs.cores:,.1f}, so {counted(needs.workers, 'worker')} per rank"),
    ]


def _rates(plan: Plan) -> Table:
    """Return a table of the samples/s that each resource allows, for each epoch."""
    from rich import box
    from rich.table import Table

    table = Table(title="Samples/s of a node", title_justify="left", box=box.SIMPLE, pad_edge=False)
    things = list(dict.fromkeys(name for epoch in plan.epochs for name in epoch.ceilings))
    for name in ("epoch", "cache hits", "read", *things, "limit", "time", "waiting"):
        table.add_column(name, justify="left" if name == "limit" else "right", no_wrap=True)
    for number, epoch in enumerate(plan.epochs):
        table.add_row(*_rate_row(number, epoch, things))
    return table


def _rate_row(number: int, epoch: Epoch, things: list[str]) -> list[str]:
    ceilings = [f"{epoch.ceilings[name]:,.0f}" if name in epoch.ceilings else "" for name in things]
    times = [_time(epoch.seconds), f"{epoch.waiting:.0%}"]
    return [f"{number + 1}", f"{epoch.hit_rate:.1%}", byte_size(epoch.read_bytes), *ceilings, epoch.limit, *times]


def _shuffles(plan: Plan) -> Table:
    """Return a table of shuffle quality, cache hits and reads, for each kind of shuffle."""
    from rich import box
    from rich.table import Table

    classes = plan.job.classes is not None
    last = plan.job.epochs
    table = Table(title="Shuffles", title_justify="left", box=box.SIMPLE, pad_edge=False)
    names = ["displacement", *["classes per batch"] * classes, "hits, epoch 1", f"hits, epoch {last}", "runs read"]
    table.add_column("", style="bold", no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for kind, rates in plan.hit_rates.items():
        quality = plan.quality.get(kind)
        if quality is None:
            cells = [""] * (1 + classes)
        else:
            cells = [f"{quality.displacement:.4f}", *[f"{quality.classes or 0:,.1f}"] * classes]
        runs = "" if quality is None else f"{quality.runs:,.0f} in {counted(quality.window, 'row')}"
        table.add_row(kind, *cells, f"{rates[0]:.1%}", f"{rates[-1]:.1%}", runs)
    some = next(iter(plan.quality.values()), None)
    if classes and some is not None:
        table.add_section()
        table.add_row("random", "0.3333", f"{some.classes_random or 0:,.1f}", "", "", "", style="dim")
    return table
