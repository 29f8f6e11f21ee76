"""The progress bar of a loader with ``progress=True``: batches had, and the share of the time spent waiting for them.

    penstock ━━━━━━━━━━━━━━╸━━━━━━ 312/625 0:00:41 0:00:40 7.61/s, waiting 3%

It is drawn on standard error by the thread that takes the batches, twice a second at most: no thread of its own that a
fork would meet, and nothing in the place of ``sys.stdout``. Where standard error is no terminal, one line is written
when the pass is over.
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

_INTERVAL = 0.5  # seconds between two drawings
_WIDTH = 20
_open: weakref.WeakSet[Bar] = weakref.WeakSet()


class Bar:
    """Shows one pass. Only one bar is drawn at a time: of an iterator within another one's loop nothing is seen.

    Args:
        statistics: of the loader; what is shown is what they count from now on.
        total: batches of the pass, None if nobody knows.
        done: of these, batches that were had before, by a run that this one resumes.
    """

    def __init__(self, statistics: Statistics, total: int | None, done: int = 0) -> None:
        self._statistics = statistics
        self._before = statistics.wait, statistics.train
        self._done, self._had = done, 0
        self._next = 0.0
        self._drawn = not _open
        if not self._drawn:
            return
        _open.add(self)
        self._progress = _progress()
        self._task = self._progress.add_task("penstock", total=total, completed=done, rate="")
        self._pid = os.getpid()
        self._end = weakref.finalize(self, _end, self._progress, self._pid)  # __del__ may not come at exit

    def update(self) -> None:
        """After each batch: draw it, if it is time to. A fraction of a microsecond, or a millisecond."""
        self._had += 1
        if self._drawn and (now := monotonic()) >= self._next:
            self._next = now + _INTERVAL
            self._progress.start()
            self._draw()

    def close(self) -> None:
        """The pass is over. Idempotent; a bar that nobody holds any more closes itself."""
        if self._drawn:
            self._drawn = False
            _open.discard(self)
            if self._progress.live.is_started and os.getpid() == self._pid:
                self._draw()
            self._end()

    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:  # modules may be empty by then
        if not _ending():
            self.close()

    def _draw(self) -> None:
        waited = max(0.0, self._statistics.wait - self._before[0])
        seconds = waited + max(0.0, self._statistics.train - self._before[1])
        speed = self._had / seconds if seconds else 0.0
        rate = f"{speed:,.{0 if speed >= 100 else 1}f}/s, waiting {waited / seconds:.0%}" if seconds else ""
        self._progress.update(self._task, completed=self._done + self._had, rate=rate, refresh=True)


def _progress() -> Progress:
    from rich import progress  # takes a while, and only those who want a bar need it
    from rich.console import Console

    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(bar_width=_WIDTH),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
        progress.TextColumn("{task.fields[rate]}"),
        console=Console(stderr=True),
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
    )


def _end(progress: Progress, pid: int) -> None:
    """Leave the last state behind and show the cursor again; not in a fork, whose terminal it is not."""
    if os.getpid() == pid and progress.live.is_started:
        progress.stop()
