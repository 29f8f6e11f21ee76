"""``penstock clips``: index video or audio files for training on clips.

``penstock clips index FILES`` writes an index of packets (`penstock.clips.clip_index`). It prints a report to standard
output, or one JSON object with ``--json``.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.tools.cli.layout import App
from penstock.tools.cli.manifest_options import Json, byte_size, console, duration, pairs, print_json, shown
from penstock.wording import counted

if TYPE_CHECKING:
    from penstock.clips.clip_index import ClipIndex

__all__ = ["app"]

app = App()


# Without a callback, typer would merge the group with its only command.
@app.callback()
def _group() -> None:
    """Index video or audio files for training on clips."""


@app.command(epilog="Example:  penstock clips index videos --out videos.clips")
def index(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILES...",
            help="A folder, with its subfolders; or files, patterns or addresses in a store.",
            show_default=False,
        ),
    ],
    *,
    sound: Annotated[bool, typer.Option("--sound", help="Index audio files, for AudioDataset.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="File of the index, instead of the user's cache.", show_default=False)
    ] = None,
    examples: Annotated[int, typer.Option("--examples", min=0, help="Number of files without clips to list.")] = 10,
    as_json: Json = False,
) -> None:
    """Index the packets of video or audio files, so that a clip anywhere in a file is read fast.

    Each file is read once. A damaged file, or one of another format, is recorded in the index, and the exit code is 1.
    An existing index at --out is replaced.
    """
    from penstock.clips.clip_index import SOUND, VIDEO
    from penstock.clips.discovery import SOUND_ENDINGS, VIDEO_ENDINGS, find_files
    from penstock.clips.indexing import open_index
    from penstock.errors import ClipError

    paths = find_files(files[0] if len(files) == 1 else files, SOUND_ENDINGS if sound else VIDEO_ENDINGS).paths
    started = time.perf_counter()
    found = open_index(paths, out, kind=SOUND if sound else VIDEO, progress=False if as_json else None, renew=True)
    seconds = time.perf_counter() - started
    errors = [error for error in found.column("error") if error]
    if len(errors) == len(found):
        raise ClipError(f"{errors[0]}; none of the {len(found):,} files can be read" if len(errors) > 1 else errors[0])
    name = shown(files[0] if len(files) == 1 else counted(len(paths), "file"))
    _report(found, name, seconds, errors[:examples], "samples" if sound else "frames", as_json=as_json)
    if errors:
        if not as_json:
            console().print(f"{len(errors):,} of {counted(len(found), 'file')} have no clips", style="red")
        raise typer.Exit(1)


def _report(found: ClipIndex, name: str, seconds: float, errors: list[str], unit: str, *, as_json: bool) -> None:
    """Print the size of the index, and the first errors."""
    size, total = os.path.getsize(found.path), int(found.lengths.sum())
    nbytes = sum(found.column("nbytes"))
    if as_json:
        broken = sum(map(bool, found.column("error")))
        said = {"files": len(found), unit: total, "bytes": nbytes, "seconds": seconds, "output": found.path}
        print_json({**said, "output_bytes": size, "broken": broken, "errors": errors})
        return
    rows = [
        ("files", f"{len(found):,}, {byte_size(nbytes)}, in {duration(seconds)}"),
        (unit, f"{total:,}"),
        ("index", f"{shown(found.path)} ({byte_size(size)})"),
    ]
    console().print(pairs(name, rows))
    for error in errors:
        console().print(shown(error))
