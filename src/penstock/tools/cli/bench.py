"""``penstock bench clips FOLDER``: compare ways to read clips of your videos on this machine."""

from __future__ import annotations

import statistics
from typing import Annotated

import typer

from penstock.tools.cli.layout import App
from penstock.tools.cli.manifest_options import Json, bar, console, print_json
from penstock.wording import counted

__all__ = ["app"]

app = App()

_WIDTH = 24  # length of the longest bar, in characters


# Without a callback, typer would merge the group with its only command.
@app.callback()
def _group() -> None:
    """Compare libraries that read clips of videos."""


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
