"""Forks by user code: a child process holds the program's batches, in memory shared with the workers.

So slots in use at a fork are neither reused nor freed until the child has ended. A pipe shows when: the child and its
descendants hold its other end. Our own forks, which start workers, do not read batches: see `our_own`.

    before the fork   create a pipe, and mark each held slot
    parent            closes the writing end; end of file means that the child has ended, or started a program
    child             keeps the writing end open
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
    """A forked process and its descendants."""

    def __init__(self) -> None:
        self._end: int | None = None  # the pipe; while None, the child counts as alive
        self._gone = False

    def begin(self, end: int) -> None:
        """Set the pipe after the fork; it reaches end of file when the child has ended."""
        os.set_blocking(end, False)
        self._end = end
        weakref.finalize(self, _close_once, end, os.getpid())

    @property
    def gone(self) -> bool:
        """Return whether the process and its descendants have ended."""
        if not self._gone and self._end is not None:
            with contextlib.suppress(BlockingIOError):
                self._gone = not os.read(self._end, 1)
        return self._gone


def _close_once(end: int, pid: int) -> None:
    if os.getpid() == pid:
        os.close(end)


class Marks(Protocol):
    """An owner of memory that a child may read."""

    def mark(self, child: Child) -> None:
        """Protect the memory held now until the child has ended; may be called repeatedly."""


class _Fork(threading.local):
    """The fork in progress in this thread."""

    ours = False
    child: Child | None = None
    pipe: tuple[int, int] | None = None


_fork = _Fork()
_marking: weakref.WeakSet[Marks] = weakref.WeakSet()


def watch(marks: Marks) -> None:
    """Register an owner for forks, as long as it lives."""
    _marking.add(marks)


@contextlib.contextmanager
def our_own() -> Iterator[None]:
    """Mark forks of this thread as our own workers, within a ``with`` block."""
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
    with contextlib.suppress(OSError):  # too many open files: then the child's end is not noticed
        _fork.pipe = os.pipe()
    _mark(_fork.child)  # before another thread drops a batch that the child inherits


def _in_parent() -> None:
    child, pipe = _fork.child, _fork.pipe
    _fork.child = _fork.pipe = None
    if child is None:
        return
    _mark(child)  # batches that another thread received meanwhile
    if pipe is not None:
        os.close(pipe[1])
        child.begin(pipe[0])


def _in_child() -> None:
    pipe, _fork.child, _fork.pipe = _fork.pipe, None, None
    if pipe is not None:
        os.close(pipe[0])


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
