"""Worker processes: start them, notice their deaths, and end them.

consumer  -- pipe of requests   -->  worker 0..n-1        one pipe each way and worker, one shared file for all:
          <-- pipe of answers --                          the number of descriptors is fixed
          == shared file: board, slots ==
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.process
import os
import pickle
import select
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

from penstock.loader.executors.process.ring import fork
from penstock.loader.executors.process.transport import Channel
from penstock.loader.executors.process.worker import Setup, main

__all__ = ["WorkerProcess", "end"]

_forks = threading.RLock()
"""Held while pipes are created or closed, and during forks.

A fork must not see a half-closed pipe, whose number may be reused, nor miss a new one.
"""


class WorkerProcess:
    """A worker as seen by the consumer.

    Args:
        setup: its start arguments, without the pipes.
        context: the `multiprocessing` context.
        started: gets this object before the process starts, so that it is ended whatever happens.

    Attributes:
        number: its number.
        process: the process.
        channel: requests and answers.
        sentinel: a descriptor that becomes readable when the process has ended.
        dead: whether it has ended, or could not start.
        ending: whether it was told to end.

    Raises:
        Exception: an error of starting, such as a dataset that cannot be pickled for spawn; or of a signal handler,
            perhaps after the start: `end` the worker.
    """

    def __init__(self, setup: Setup, context: Any, started: list[WorkerProcess]) -> None:
        self.number = setup.number
        self.process: Any = None
        self.dead, self.ending = True, False
        with _forks:
            theirs, self._requests = context.Pipe(duplex=False)
            self._answers, results = context.Pipe(duplex=False)
            _open.add(self)  # before the fork, which must close its copies
        self.channel = Channel(self._answers.fileno(), self._requests.fileno())
        started.append(self)
        try:
            for connection in (self._requests, self._answers):
                os.set_blocking(connection.fileno(), False)
            with _holding_back_signals(context.get_start_method()) as held_back:
                setup = setup._replace(pipes=(theirs, results), held_back=held_back)
                process = context.Process(
                    target=main, args=(setup,), name=f"penstock-worker-{self.number}", daemon=True
                )
                try:
                    fork.ours = True
                    process.start()
                except (pickle.PicklingError, AttributeError, TypeError) as error:
                    _explain(error, setup)
                    raise
                finally:
                    fork.ours = False
                self.process, self.dead, self.sentinel = process, False, process.sentinel
                if hasattr(os, "pidfd_open"):
                    # multiprocessing's sentinel is a pipe that processes started by the worker keep open.
                    with contextlib.suppress(OSError):  # not permitted
                        self._pidfd = Connection(os.pidfd_open(process.pid), writable=False)
                        self.sentinel = self._pidfd.fileno()
        except BaseException:
            self.close()
            raise
        finally:
            theirs.close()
            results.close()

    def wait(self, deadline: float) -> bool:
        """Wait for the process to end; return whether it has."""
        if self.process.exitcode is None:
            poller = select.poll()
            poller.register(self.sentinel, select.POLLIN)
            if poller.poll(max(0.0, (deadline - time.monotonic()) * 1000)) and self.process.exitcode is None:
                self.process.join(1)  # a fork server reports it a little later
        if self.process.exitcode is None:
            return False
        self.process.join(0)  # makes multiprocessing release its resources
        return True

    def dismiss(self) -> None:
        """Let the worker end when it has answered all requests."""
        self.channel.closed = True
        with _forks:
            self._requests.close()

    def close(self) -> None:
        """Close our ends of the pipes."""
        self.dismiss()
        with _forks:
            self._answers.close()

    def obituary(self, peak: int) -> str:
        """Return how it died, in torch's words and with details.

        Args:
            peak: its peak memory in KiB; 0 if unknown.
        """
        process, code = self.process, self.process.exitcode
        memory = f" Its memory was {peak / 1024:.0f} MiB at its last batch." if peak else ""
        if code is None or code >= 0:
            return f"DataLoader worker (pid {process.pid}) exited unexpectedly with exit code {code}.{memory}"
        text = f"DataLoader worker (pid {process.pid}) is killed by signal: {signal.strsignal(-code)}.{memory}"
        if -code == signal.SIGKILL:
            text += " The kernel does that when memory runs out: see dmesg; use fewer workers, or smaller batches."
        elif -code == signal.SIGBUS:
            text += " A mapped file was truncated while it was read (replace files by rename), or memory ran out."
        return text


_open: weakref.WeakSet[WorkerProcess] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close our pipe ends in a forked child: with copies open elsewhere, workers would never see end of file."""
    for worker in list(_open):
        worker.close()
        # multiprocessing in the child would end them: it takes the parent's children for its own.
        multiprocessing.process._children.discard(worker.process)  # type: ignore[attr-defined]
    _forks.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_forks.acquire, after_in_parent=_forks.release, after_in_child=_close_in_child)


def end(workers: list[WorkerProcess], patience: float) -> None:
    """End workers whose pipes are closed: wait ``patience`` seconds for all, then kill them."""
    alive = [worker for worker in workers if not worker.dead]
    deadline = time.monotonic() + patience
    for how in (None, "terminate", "kill"):
        for worker in alive:
            if how is not None:
                getattr(worker.process, how)()
        alive = [worker for worker in alive if not worker.wait(deadline)]
        deadline = time.monotonic() + 1.0
    for worker in workers:
        worker.dead = True


@contextlib.contextmanager
def _holding_back_signals(method: str) -> Iterator[bool]:
    """Delay Ctrl-C and the program's signal handlers while a worker is started with this method.

    A handler that raised there would leave a half-started worker: nobody would know its process. Delayed signals are
    raised again afterwards.

    Ctrl-C reaches all processes of the group. A worker would print a traceback before it can set a handler, so it
    starts with the signal blocked, like this thread. Yield whether the worker has to unblock it.
    """
    here, starting = os.getpid(), True
    came: list[int] = []
    handlers: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        found = {number: signal.getsignal(number) for number in signal.valid_signals()}
        handlers = {number: handler for number, handler in found.items() if callable(handler)}

    def hold_back(number: int, frame: Any) -> None:
        if starting and os.getpid() == here:
            came.append(number)
        else:
            handlers[number](number, frame)

    # The fork server would pass a blocked signal on to everything else that it starts.
    blocks = method != "forkserver"
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        for number in handlers:
            signal.signal(number, hold_back)
        if method == "spawn":
            from multiprocessing import resource_tracker

            # It unblocks the signal when it starts.
            resource_tracker.ensure_running()
        if blocks:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        yield blocks and signal.SIGINT not in before
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        starting = False
        # Whatever raises, the others are called, too: the last one first.
        with contextlib.ExitStack() as after:
            for number in came:
                after.callback(signal.raise_signal, number)
            for number, handler in handlers.items():
                after.callback(signal.signal, number, handler)


def _explain(error: Exception, setup: Setup) -> None:
    """Add a note that names the loader's argument that cannot be pickled, and the remedies."""
    fetcher = setup.fetcher
    for name, value in {
        "dataset": fetcher.dataset,
        "collate_fn": fetcher.collate_fn,
        "worker_init_fn": setup.init,
        "on_error": getattr(fetcher, "on_error", None),
    }.items():
        try:
            ForkingPickler.dumps(value)
        except Exception as again:
            if str(again) == str(error):
                kind = getattr(value, "__qualname__", type(value).__qualname__)
                error.add_note(
                    f"the {name} ({kind}) cannot be pickled, but workers that are not forked need that: use only "
                    "picklable parts (functions and classes of a module, not local ones), or pass "
                    "multiprocessing_context='fork'"
                )
                return
