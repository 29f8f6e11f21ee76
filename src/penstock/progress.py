"""One progress bar, on standard error, for the long passes of the library."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

__all__ = ["LARGE", "progress_bar"]

LARGE = 256 << 20
"""Passes over more bytes than this get a bar without being asked, when standard error is a terminal."""


def _ignore(amount: int) -> None:
    """Nobody is watching."""


@contextlib.contextmanager
def progress_bar(
    title: str, total: int, show: bool | None, *, in_bytes: bool = True
) -> Iterator[Callable[[int], object]]:
    """A function to call with the number of bytes (or rows, without ``in_bytes``) just done.

    It draws a bar if ``show`` is True, or None on a terminal and, for bytes, if there are many of them.
    """
    watched = sys.stderr is not None and sys.stderr.isatty()  # a daemon has none
    if show is False or (show is None and ((in_bytes and total <= LARGE) or not watched)):
        yield _ignore
        return
    from rich import progress
    from rich.console import Console

    sizes = progress.DownloadColumn(), progress.TransferSpeedColumn()
    counts = sizes if in_bytes else (progress.MofNCompleteColumn(),)
    columns = (progress.TextColumn("{task.description}"), progress.BarColumn(), *counts, progress.TimeRemainingColumn())
    with progress.Progress(*columns, console=Console(stderr=True), transient=show is None) as bar:
        task = bar.add_task(title, total=total)
        yield lambda amount: bar.advance(task, amount)
