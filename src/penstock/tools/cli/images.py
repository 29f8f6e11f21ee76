"""``penstock images``: index the images of a manifest for fast crops.

``penstock images index FILE`` writes an index of entries (`penstock.images.entries`). It prints a report to standard
output, or one JSON object with ``--json``.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.tools.cli.layout import App
from penstock.tools.cli.manifest_options import (
    Json,
    Reading,
    Workers,
    bar,
    byte_size,
    console,
    duration,
    pairs,
    print_json,
    reading,
    shown,
    speed,
)
from penstock.wording import counted

if TYPE_CHECKING:
    from penstock.images.entries import IndexReport

__all__ = ["app"]

app = App()


# Without a callback, typer would merge the group with its only command.
@app.callback()
def _group() -> None:
    """Index the images of a manifest for fast crops."""


@app.command(epilog="Example:  penstock images index train.txt --root /data/imagenet")
@reading
def index(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="A manifest (text, CSV, TSV, JSONL, Parquet or Arrow) or a folder of images.",
            show_default=False,
        ),
    ],
    *,
    how: Reading,
    step: Annotated[int, typer.Option(min=1, max=65535, help="Distance of entries in MCUs (8 or 16 pixels).")] = 8,
    out: Annotated[
        Path | None, typer.Option(help="File of the index, instead of FILE.entries.", show_default=False)
    ] = None,
    workers: Workers = None,
    examples: Annotated[int, typer.Option("--examples", min=0, help="Number of unreadable images to list.")] = 10,
    as_json: Json = False,
) -> None:
    """Write an index of entries beside the manifest, so that crops of JPEGs are decoded faster.

    Each file is read once. Unreadable images are left out, and the exit code is 1.
    If no image has entries, nothing is written.
    """
    from penstock.errors import ManifestIOError
    from penstock.images.entries import index_path, write_index
    from penstock.storage import is_writable

    manifest = how.open(file, bars=not as_json)
    out = out or index_path(manifest)
    if not is_writable(out.parent):  # fail now, not after an hour of reading
        raise ManifestIOError(f"cannot write to the folder of {out}: choose another path with --out")
    with bar("indexing", show=not as_json) as show:
        started = time.perf_counter()
        report = write_index(manifest, step=step, path=out, workers=workers, progress=show)
    seconds = time.perf_counter() - started
    if as_json:
        _print_json(report, seconds, examples)
    else:
        _print(file, report, seconds, examples)
    if report.unread:
        raise typer.Exit(1)


def _print_json(report: IndexReport, seconds: float, examples: int) -> None:
    print_json(
        {
            "images": report.images,
            "indexed": report.indexed,
            "bytes": report.nbytes,
            "seconds": seconds,
            "output": report.path,
            "output_bytes": report.path.stat().st_size,
            "broken": report.unread,
            "errors": [{"row": one.row, "error": one.message} for one in report.errors[:examples]],
        }
    )


def _print(name: str, report: IndexReport, seconds: float, examples: int) -> None:
    """Print a table, then the errors."""
    size = report.path.stat().st_size
    rate = f"{report.images / seconds:,.0f} images/s, {speed(report.nbytes, seconds)}"
    rows = [
        ("images", f"{report.images:,} in {duration(seconds)}: {rate}"),
        ("written", f"{shown(str(report.path))} ({byte_size(size)}, {size / report.nbytes:.1%} of the images)"),
    ]
    without = report.images - report.indexed - report.unread
    if without:
        rows.append(
            ("without entries", f"{counted(without, 'image')}: progressive, with restart markers, damaged, or not JPEG")
        )
    out = console()
    out.print(pairs(shown(name), rows))
    for error in report.errors[:examples]:
        out.print(f"row {error.row}: {shown(error.message)}")
    if report.unread:
        out.print(f"{report.unread:,} of {counted(report.images, 'image')} cannot be read", style="red")
