"""``penstock profile``: find the limiting stage of a loader, and its best executor and number of workers.

The measurement is `penstock.tools.profiling.profile`. This module prints tables to standard output, or one JSON
object with ``--json``; with ``--html FILE`` it also writes a page with plots.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.errors import ConfigError
from penstock.tools.cli.interrupt import AtOnce
from penstock.tools.cli.manifest_options import Json, Reading, bar, console, print_json, reading
from penstock.wording import counted

if TYPE_CHECKING:
    from penstock.tools.profiling import Profile

__all__ = ["command"]

_WIDTH = 24  # length of the longest bar, in characters
_BATCH_SIZE = 64  # default if the target is a path


class _Executor(StrEnum):
    AUTO = "auto"
    PROCESS = "process"
    THREAD = "thread"


@reading
def command(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:LOADER|PATH",
            help="A loader in a module or a .py file, a function that returns one, or a manifest, shards or a folder.",
        ),
    ],
    *,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.1, help="Approximate duration of the measurement.")
    ] = 20.0,
    step_ms: Annotated[
        float | None,
        typer.Option(
            "--step-ms", min=0.001, help="Milliseconds of a training step, to test whether the loader keeps up."
        ),
    ] = None,
    executor: Annotated[
        list[_Executor] | None,
        typer.Option("--executor", help="Try only this one; repeatable.  [default: the safe ones]"),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option("--batch-size", min=1, help="For a path: samples of a batch.  [default: 64]"),
    ] = None,
    size: Annotated[
        int | None,
        typer.Option("--size", min=1, help="For a path: side length in pixels of image crops.  [default: 224]"),
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write a report with plots into this file.")] = None,
    as_json: Json = False,
    how: Reading,
) -> None:
    """Measure a loader stage by stage, and find what limits it and its best setting on this machine."""
    with AtOnce():
        from penstock.tools.cli import profile_source
        from penstock.tools.profiling import profile, report

    if html is not None and (html.is_dir() or not html.resolve().parent.is_dir()):
        raise ConfigError(
            f"--html {str(html)!r}: {'this is a folder' if html.is_dir() else 'its folder does not exist'}"
        )
    if profile_source.names_a_loader(target):
        if how != Reading() or (batch_size, size) != (None, None):
            raise ConfigError(
                f"--batch-size, --size and the options of 'How to read' are for a path, but {target} is a loader: "
                "leave them out"
            )
        loader = profile_source.load(target)
    else:
        loader = profile_source.load_path(target, how=how, batch_size=batch_size or _BATCH_SIZE, size=size)
    step = None if step_ms is None else step_ms / 1000
    with bar("measuring", show=not as_json) as progress:
        found = profile(loader, seconds=seconds, step=step, executors=executor, name=target, progress=progress)
    if html is not None:
        try:
            html.write_text(report(found), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {str(html)!r}: {error.strerror}") from error
    if as_json:
        print_json(found.as_dict())
        return
    _print(found)
    if html is not None:
        console().print(f"report: {html}")


def _print(profile: Profile) -> None:
    from rich.text import Text

    out = console()
    out.print(
        f"{profile.name}: batches of {profile.batch_size}, {counted(profile.cores, 'core')}, {profile.seconds:.0f} s"
    )
    out.print()
    out.print(_stages(profile))
    out.print()
    out.print(_trials(profile))
    out.print()
    for sentence in profile.verdict.sentences:
        out.print(Text(sentence), soft_wrap=False)


def _stages(profile: Profile) -> Any:
    from penstock.tools.profiling.report import rate, span

    table = _table("each stage alone, in one thread; ceilings in samples/s")
    for head in ("stage", "new", "cached", "waiting", "one core", f"all {profile.cores}"):
        table.add_column(head, justify="left" if head == "stage" else "right")
    for stage in profile.stages:
        ceilings = rate(stage.ceiling()), rate(stage.ceiling(profile.cores))
        mark = " <" if stage.name == profile.verdict.limit_cached else ""
        table.add_row(stage.name + mark, span(stage.first), span(stage.again), f"{stage.waits:.0%}", *ceilings)
    table.add_section()
    total = [sum(values) for values in zip(*((s.first, s.again) for s in profile.stages), strict=True)]
    best = max((trial.rate for trial in profile.trials if trial.cached), default=0.0)
    table.add_row("all stages", *map(span, total), "", rate(profile.rate_alone()), rate(best))
    return table


def _trials(profile: Profile) -> Any:
    from penstock.tools.profiling.report import rate, span

    table = _table("executors and workers at full speed")
    for head in ("setting", "samples", "samples/s", "first batch", ""):
        table.add_column(head, justify="right" if head in ("samples/s", "first batch") else "left")
    best = max((trial.rate for trial in profile.trials), default=0.0) or 1.0
    for trial in profile.trials:
        mark = " <" if trial.setting == profile.verdict.setting else ""
        what = "cached" if trial.cached else "new"
        line = "█" * round(_WIDTH * trial.rate / best)
        cells = ("–", "–", "no result") if trial.error else (rate(trial.rate), span(trial.start), line)
        table.add_row(f"{trial.setting}{mark}", what, *cells)
    return table


def _table(title: str) -> Any:
    from rich import box
    from rich.table import Table

    return Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False)
