"""Forks by others: a child has the batches that this program held, in memory that it shares with the workers.

So what is held at a fork is not written to again, and not given back to the system, until the child is gone: it, and
all that it forked, hold the other end of a pipe. Forks of our own, which start workers, read no batches: `our_own`.

    before the fork   a pipe, and a mark on each slot that is held
    parent            closes the end for writing: its own end tells of the child's end, or of its turning to a program
    child             leaves the end for writing open
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Protocol

__all__ = ["Child", "Marks", "our_own", "watch"]


class Child:
    """A process that was forked, with those that it forks."""

    def __init__(self) -> None:
        self._end: int | None = None  # of the pipe; as long as there is none, the child is there
        self._gone = False

    def begin(self, end: int) -> None:
        """The fork is made: the pipe is at its end when the child is."""
        os.set_blocking(end, False)
        self._end = end
        weakref.finalize(self, _close_once, end, os.getpid())

    @property
    def gone(self) -> bool:
        """Whether nothing of it is left."""
        if not self._gone and self._end is not None:
            with contextlib.suppress(BlockingIOError):
                self._gone = not os.read(self._end, 1)
        return self._gone


def _close_once(end: int, pid: int) -> None:
    if os.getpid() == pid:
        os.close(end)


class Marks(Protocol):
    """Whoever has memory that a child may see."""

    def mark(self, child: Child) -> None:
        """Keep what is held now as it is while the child is there. Once more for what is marked already."""


class _Fork(threading.local):
    """The fork that this thread is making."""

    ours = False
    child: Child | None = None
    pipe: tuple[int, int] | None = None


_fork = _Fork()
_marking: weakref.WeakSet[Marks] = weakref.WeakSet()


def watch(marks: Marks) -> None:
    """Have somebody told of forks, as long as they live."""
    _marking.add(marks)


@contextlib.contextmanager
def our_own() -> Iterator[None]:
    """Forks of this thread are workers of ours."""
    before, _fork.ours = _fork.ours, True
    try:
        yield
    finally:
        _fork.ours = before


def _mark(child: Child) -> None:
    for marks in list(_marking):
        marks.mark(child)


def _before() -> None:
    _fork.child = _fork.pipe = None
    if _fork.ours or not _marking:
        return
    _fork.child = Child()
    with contextlib.suppress(OSError):  # too many files are open: then nobody hears of the child's end
        _fork.pipe = os.pipe()
    _mark(_fork.child)  # before another thread drops what the child will have


def _in_parent() -> None:
    child, pipe = _fork.child, _fork.pipe
    _fork.child = _fork.pipe = None
    if child is None:
        return
    _mark(child)  # what another thread was handed meanwhile
    if pipe is not None:
        os.close(pipe[1])
        child.begin(pipe[0])


def _in_child() -> None:
    pipe, _fork.child, _fork.pipe = _fork.pipe, None, None
    if pipe is not None:
        os.close(pipe[0])


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
