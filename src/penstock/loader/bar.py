"""The progress bar for ``progress=True``: delivered batches and the share of time spent waiting for them.

    penstock ━━━━━━━━━━────────── 312/625 0:00:41 0:00:40 7.6/s, waiting 3%

The consumer's thread writes it to standard error, at most twice a second. If that is neither a terminal nor a notebook,
one line is written at the end of the epoch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from time import monotonic

from penstock.loader.statistics import Statistics

__all__ = ["Bar"]

# Seconds between two updates.
_INTERVAL = 0.5
_WIDTH = 20


class Bar:
    """The progress bar of one epoch iterator.

    Args:
        statistics: the loader's statistics, read from now on.
        total: number of batches; None if unknown.
        done: number of these batches that were delivered before a resume.
    """

    def __init__(self, statistics: Statistics, total: int | None, done: int = 0) -> None:
        self._statistics = statistics
        self._before = statistics.wait, statistics.train
        self._total, self._done, self._had = total, done, 0
        self._begin, self._next = monotonic(), 0.0
        # A daemon has no standard error, and a notebook shows it.
        self._watched = sys.stderr is not None and (sys.stderr.isatty() or "ipykernel" in sys.modules)
        self._open, self._pid = True, os.getpid()

    def update(self) -> None:
        """Record a batch, and draw if it is time. Takes a fraction of 1 µs, or about 20 µs to draw."""
        self._had += 1
        if self._watched and (now := monotonic()) >= self._next:
            self._next = now + _INTERVAL
            self._draw()

    def close(self) -> None:
        """Finish the line at the end of the epoch. Idempotent. A bar without references closes itself."""
        # In a fork, its parent does it.
        if self._open and self._had and os.getpid() == self._pid and sys.stderr is not None:
            self._open = False
            self._draw()
            print(file=sys.stderr, flush=True)

    # The default argument stays valid when modules are already cleared at exit.
    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not _ending():
            self.close()

    def _draw(self) -> None:
        count, total = self._done + self._had, self._total
        waited = max(0.0, self._statistics.wait - self._before[0])
        seconds = waited + max(0.0, self._statistics.train - self._before[1])
        words = ["penstock", f"{count}/{'?' if total is None else total}", _clock(monotonic() - self._begin)]
        if total:
            full = round(_WIDTH * min(1.0, count / total))
            words.insert(1, "━" * full + "─" * (_WIDTH - full))
            words.append(_clock(max(0, total - count) * seconds / self._had))
        if seconds:
            speed = self._had / seconds
            words.append(f"{speed:,.{0 if speed >= 100 else 1}f}/s, waiting {waited / seconds:.0%}")
        # In place of the line before, which may be longer.
        text = f"\r{' '.join(words):79}" if self._watched else " ".join(words)
        print(text, end="", file=sys.stderr, flush=True)


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=int(seconds)))
