"""``penstock bench``: compare libraries on this machine with your own files.

``penstock bench readers FOLDER`` compares the installed image backends and recommends one. It prints a table, or one
JSON object with ``--json``; ``--plot FILE`` draws the result with matplotlib.
``penstock bench clips FOLDER`` compares ways to read clips of videos.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.tools.cli.layout import App
from penstock.tools.cli.manifest_options import Json, bar, console, print_json
from penstock.tools.cli.plots import check_plot
from penstock.wording import counted

if TYPE_CHECKING:
    from penstock.images.compare import Comparison, Files

__all__ = ["app"]

app = App()

_WIDTH = 24  # length of the longest bar, in characters


@app.callback()
def _group() -> None:
    """Find the fastest library for your own files."""


@app.command(epilog="Example:  penstock bench readers /data/imagenet/val --files 500 --plot readers.png")
def readers(
    folder: Annotated[
        Path | None, typer.Argument(help="Folder of images, with its subfolders; else generated JPEGs.")
    ] = None,
    *,
    files: Annotated[int, typer.Option("--files", min=1, help="Number of files, spread evenly over the folder.")] = 200,
    target: Annotated[int, typer.Option("--target", min=1, help="Side length in pixels after resizing.")] = 224,
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="Threads to measure besides one.  [default: all CPUs]")
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Measurements of each backend, in turn.")] = 3,
    backend: Annotated[list[str] | None, typer.Option("--backend", help="Measure only this one; repeatable.")] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw the result into this file; needs matplotlib.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare the installed image backends on your files: header, full decode, decode to a size, crop."""
    from penstock.cores import cores
    from penstock.images import compare

    if backend:
        from penstock.images.backends import choose

        for name in backend:
            choose(name, "jpeg")
    if plot is not None:
        check_plot(plot)
    found = compare.synthetic_jpegs() if folder is None else compare.sample(folder, count=files)
    counts = list(dict.fromkeys((1, threads or cores())))
    with bar("measuring", show=not as_json) as progress:
        result = compare.compare(
            found, target=target, threads=counts, rounds=rounds, backends=backend or None, progress=progress
        )
    if as_json:
        print_json(_as_json(found, result, counts, target))
    else:
        _print(found, result, counts, target)
    if plot is not None and not _draw(plot, result, counts):
        console(stderr=True).print("no plot: matplotlib is not installed")


@app.command(epilog="Example:  penstock bench clips /data/videos --frames 16 --step 2")
def clips(
    files: Annotated[list[str], typer.Argument(help="A folder of videos, or files or patterns.", show_default=False)],
    *,
    frames: Annotated[int, typer.Option("--frames", min=1, help="Frames of a clip.")] = 16,
    step: Annotated[int, typer.Option("--step", min=1, help="Distance of frames in a clip.")] = 1,
    count: Annotated[int, typer.Option("--clips", min=1, help="Clips of a round, at random starts.")] = 50,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Measurements of each way, in turn.")] = 3,
    as_json: Json = False,
) -> None:
    """Compare ways to read clips of your videos in one thread: Penstock's index, PyAV and torchcodec."""
    from penstock.clips.compare import compare
    from penstock.clips.discovery import VIDEO_ENDINGS, find_files

    paths = find_files(files[0] if len(files) == 1 else files, VIDEO_ENDINGS).paths
    with bar("measuring", show=not as_json) as progress:
        found = compare(paths, frames=frames, step=step, clips=count, rounds=rounds, progress=progress)
    if as_json:
        print_json(vars(found))
        return
    from rich.table import Table

    out = console()
    out.print(f"{counted(found.files, 'file')}, clips of {frames} frames, step {step}, full size; clips/s, one thread")
    if found.left_out:
        out.print(f"left out: {counted(found.left_out, 'file')} with too few frames")
    table = Table()
    for name in ("", "min", "median", "max"):
        table.add_column(name, justify="right" if name else "left")
    table.add_column("")
    middle = {name: statistics.median(values) for name, values in found.clips_per_second.items()}
    for name, values in found.clips_per_second.items():
        cells = [f"{value:,.1f}" for value in (min(values), middle[name], max(values))]
        table.add_row(name, *cells, "█" * round(_WIDTH * middle[name] / max(middle.values())))
    out.print(table)
    for name in found.missing:
        out.print(f"{name} is not installed")


def _as_json(files: Files, result: Comparison, counts: Sequence[int], target: int) -> dict[str, Any]:
    return {
        "format": files.kind,
        "files": result.files,
        "other_formats": files.left_out,
        "unreadable": files.unreadable,
        "target": target,
        "threads": list(counts),
        "images_per_second": {
            name: [{"task": task, "threads": count, "value": value} for (task, count), value in found.items()]
            for name, found in result.speed.items()
        },
        "failed": result.failed,
        "advice": _advice(files, result, counts[-1]),
    }


def _print(files: Files, result: Comparison, counts: Sequence[int], target: int) -> None:
    from rich.table import Table

    from penstock.images.compare import TASKS

    out = console()
    out.print(f"{counted(result.files, f'{files.kind} file')} in memory, images/s, crop and target {target} x {target}")
    if files.left_out:
        out.print(f"left out: {counted(files.left_out, 'file')} of other formats")
    if files.unreadable:
        out.print(f"left out: {counted(files.unreadable, 'file')} that cannot be read")
    for name, failed in result.failed.items():
        if failed:
            out.print(f"left out for all: {counted(failed, 'file')} that {name} cannot read")
    for task in TASKS:
        table = Table(title=task, title_justify="left")
        table.add_column("backend")
        for count in counts:
            table.add_column(counted(count, "thread"), justify="right")
        table.add_column("")
        fastest = max((found.get((task, counts[-1]), 0.0) for found in result.speed.values()), default=0.0)
        for name, found in result.speed.items():
            if (task, counts[-1]) not in found:
                continue
            cells = [f"{found[task, count]:,.0f}" for count in counts]
            table.add_row(name, *cells, "█" * round(_WIDTH * found[task, counts[-1]] / fastest))
        if table.row_count:
            out.print(table)
    for line in _advice(files, result, counts[-1]):
        out.print(line)


def _advice(files: Files, result: Comparison, threads: int) -> list[str]:
    """Return lines that recommend backends, or name a missing extension."""
    from penstock.images import native

    lines = []
    whole, crop = result.best("decode", threads), result.best("crop", threads)
    if whole is not None:
        lines.append(f'whole images: decode(..., backend="{whole}")')
    if crop == "native" and files.kind == "jpeg":
        lines.append("random crops: decode_region, which ImageDataset uses automatically (backend native)")
    elif crop is not None:
        lines.append(f"crops: {crop}, which decodes the whole image")
    if not native.is_available():
        lines.append(
            "the C extension is not built, so crops need the whole image: install a C compiler and the headers of "
            "libjpeg-turbo (Debian: apt-get install gcc libjpeg62-turbo-dev), then install penstock again"
        )
    return lines


def _draw(path: Path, result: Comparison, counts: Sequence[int]) -> bool:
    """Draw bars by task and backend; return False if matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    from penstock.errors import ConfigError

    tasks = [
        task for task in ("decode", "target", "crop") if any((task, counts[0]) in f for f in result.speed.values())
    ]
    figure = Figure(figsize=(4 * len(tasks), 0.6 * len(result.speed) + 1.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels: Any = figure.subplots(1, len(tasks), sharey=True, squeeze=False)
    names = list(result.speed)
    for axes, task in zip(panels[0], tasks, strict=True):
        for k, count in enumerate(counts):
            places = [row + 0.8 * (k + 0.5) / len(counts) - 0.4 for row in range(len(names))]
            axes.barh(
                places,
                [result.speed[name].get((task, count), 0.0) for name in names],
                0.8 / len(counts),
                label=counted(count, "thread"),
            )
        axes.set(title=task, xlabel="images/s", yticks=range(len(names)), yticklabels=names)
        axes.invert_yaxis()
    panels[0][0].legend(fontsize=8)
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(f"cannot draw into {str(path)!r}: {error}") from error
    return True
