"""The progress bar of the library's long operations, on standard error."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

__all__ = ["LARGE", "progress_bar"]

LARGE = 256 << 20
"""By default, operations on more bytes than this show a bar if standard error is a terminal."""


def _ignore(amount: int) -> None:
    """Do nothing: no bar is shown."""


@contextlib.contextmanager
def progress_bar(
    title: str, total: int, show: bool | None, *, in_bytes: bool = True
) -> Iterator[Callable[[int], object]]:
    """Yield a function that takes the number of bytes (rows, if not ``in_bytes``) that were just processed.

    ``show=True`` draws a bar. ``show=None`` draws one only on a terminal and, for bytes, only above `LARGE`.
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
