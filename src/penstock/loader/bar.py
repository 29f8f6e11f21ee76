"""The progress bar for ``progress=True``: delivered batches and the share of time spent waiting for them.

    penstock ━━━━━━━━━━━━━━╸━━━━━━ 312/625 0:00:41 0:00:40 7.61/s, waiting 3%

The consumer's thread draws it on standard error, at most twice a second. There is no extra thread that a fork would
lose, and ``sys.stdout`` is not replaced. If standard error is not a terminal, one line is written at the end of the
epoch.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING

from penstock.loader.statistics import Statistics

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["Bar"]

# Seconds between two updates.
_INTERVAL = 0.5
_open: weakref.WeakSet[Bar] = weakref.WeakSet()


class Bar:
    """The progress bar of one epoch iterator.

    Only one bar is drawn at a time, so an iterator inside another one's loop shows none.

    Args:
        statistics: the loader's statistics, read from now on.
        total: number of batches; None if unknown.
        done: number of these batches that were delivered before a resume.
    """

    def __init__(self, statistics: Statistics, total: int | None, done: int = 0) -> None:
        self._statistics = statistics
        self._before = statistics.wait, statistics.train
        self._done, self._had = done, 0
        self._next = 0.0
        self._drawn = not _open
        if not self._drawn:
            return
        # Imported here because it is slow and only needed for a bar.
        from rich import progress
        from rich.console import Console

        _open.add(self)
        self._progress = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(bar_width=20),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.fields[rate]}"),
            console=Console(stderr=True),
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._progress.add_task("penstock", total=total, completed=done, rate="")
        self._pid = os.getpid()
        # __del__ may not be called at exit.
        self._end = weakref.finalize(self, _end, self._progress, self._pid)

    def update(self) -> None:
        """Record a batch, and draw if it is time. Takes a fraction of 1 µs, or 1 ms to draw."""
        self._had += 1
        if self._drawn and (now := monotonic()) >= self._next:
            self._next = now + _INTERVAL
            self._progress.start()
            self._draw()

    def close(self) -> None:
        """Finish the bar at the end of the epoch. Idempotent. A bar without references closes itself."""
        if self._drawn:
            self._drawn = False
            _open.discard(self)
            if self._progress.live.is_started and os.getpid() == self._pid:
                self._draw()
            self._end()

    # The default argument stays valid when modules are already cleared at exit.
    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not _ending():
            self.close()

    def _draw(self) -> None:
        waited = max(0.0, self._statistics.wait - self._before[0])
        seconds = waited + max(0.0, self._statistics.train - self._before[1])
        speed = self._had / seconds if seconds else 0.0
        rate = f"{speed:,.{0 if speed >= 100 else 1}f}/s, waiting {waited / seconds:.0%}" if seconds else ""
        self._progress.update(self._task, completed=self._done + self._had, rate=rate, refresh=True)


def _end(progress: Progress, pid: int) -> None:
    """Leave the last state on screen and show the cursor again. In a fork, do nothing: its parent does it."""
    if os.getpid() == pid and progress.live.is_started:
        progress.stop()
