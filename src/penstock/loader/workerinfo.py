"""``torch.utils.data.get_worker_info()`` inside our workers, threads included: the one module that reaches into torch.

torch keeps the answer in one variable of its module, which a process worker may set and threads would share. So here
the *code* of torch's function is replaced, once, when a worker of ours first needs it: names that were imported earlier
(``from torch.utils.data import get_worker_info``) follow. The answer is that of this thread if it is a worker, else
torch's variable, as before: in the main thread None, in torch's own workers what they have set.

In our workers torch's ``default_collate`` alone is told None: it would give every tensor a shared memory segment, and a
file descriptor, for a trip to another process that it does not take.

Tested against the installed torch; where its internals are not as expected, a warning is given and threads see None.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import warnings
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils import collate as _torch_collate
from torch.utils.data._utils import worker as _torch_worker

__all__ = ["enter", "expected", "process_worker", "seed_worker", "thread_worker", "worker_scope"]


class _Local(threading.local):
    """What torch's function is answered from. Class attributes are the same for all threads."""

    info: Any = None  # of this thread, if it is a worker
    process: Any = None  # of this process, if it is a worker of ours
    frame = staticmethod(sys._getframe)
    collate = vars(_torch_collate)


_penstock = _Local()
_worker_info: Any = None  # a stand-in: the code below looks both names up in torch's module
_installing = threading.Lock()
_installed = False


def _answer() -> Any:
    """Runs as torch's ``get_worker_info``, in the namespace of torch's module."""
    info = _penstock.info
    if info is None:
        info = _worker_info
        if info is None or info is not _penstock.process:
            return info
    return None if _penstock.frame(1).f_globals is _penstock.collate else info


def expected() -> bool:
    """Whether torch's function is as this module knows it: it returns one variable of its module."""
    function = _torch_worker.get_worker_info
    code = getattr(function, "__code__", None)
    return (
        code is not None
        and code.co_names == ("_worker_info",)
        and not code.co_freevars
        and not code.co_argcount
        and function.__globals__ is vars(_torch_worker)
    )


def _install() -> None:
    global _installed
    with _installing:
        if _installed:
            return
        if not expected():
            _installed = True
            warnings.warn(
                f"torch {torch.__version__} keeps get_worker_info() in a way that Penstock does not know: it is None "
                "in threads. Use executor='process' if your dataset needs it",
                RuntimeWarning,
                stacklevel=4,
            )
            return
        vars(_torch_worker)["_penstock"] = _penstock
        if hasattr(os, "register_at_fork"):  # not on Windows, where there are no forks, and threads all the same
            # A fork in a worker thread has that thread alone, which is no worker of ours any more.
            os.register_at_fork(after_in_child=_forget)
        _torch_worker.get_worker_info.__code__ = _answer.__code__
        _installed = True


def _forget() -> None:
    _penstock.info = None


def thread_worker(number: int, num_workers: int, seed: int, dataset: Any) -> Any:
    """torch's ``WorkerInfo`` for a thread, read-only as torch's.

    Args:
        seed: of this worker, by torch's rule base seed + number.
        dataset: the one that all threads share.
    """
    return _info(number, num_workers, seed, dataset, "thread")


def _info(number: int, num_workers: int, seed: int, dataset: Any, method: str) -> Any:
    fields: dict[str, Any] = {"id": number, "num_workers": num_workers, "seed": seed, "dataset": dataset}
    if "worker_method" in getattr(_torch_worker.WorkerInfo, "__dataclass_fields__", {}):  # newer versions of torch
        fields["worker_method"] = method
    return _torch_worker.WorkerInfo(**fields)


class worker_scope:
    """``with worker_scope(info):`` ``get_worker_info()`` returns ``info`` in this thread; None leaves it to torch."""

    __slots__ = ("_before", "_info")

    def __init__(self, info: Any) -> None:
        self._info = info

    def __enter__(self) -> None:
        self._before = _penstock.info
        enter(self._info)

    def __exit__(self, *exc: object) -> None:
        _penstock.info = self._before


def enter(info: Any) -> None:
    """As `worker_scope`, for good; None ends it."""
    if not _installed:
        _install()
    _penstock.info = info


def process_worker(number: int, num_workers: int, seed: int, dataset: Any) -> Any:
    """From now on this process is a worker, in all its threads. To be called once, in the worker process.

    Args:
        seed: of this worker, by torch's rule base seed + number.
        dataset: this worker's copy.

    Returns:
        torch's ``WorkerInfo``.
    """
    enter(None)
    info = _info(number, num_workers, seed, dataset, "multiprocessing")
    _Local.process = info
    _torch_worker._worker_info = info
    return info


def seed_worker(base_seed: int, number: int) -> None:
    """Seed Python's, torch's and NumPy's global generators as torch does in its worker processes.

    Args:
        base_seed: of the iterator, below 2**64; ``torch.initial_seed()`` is base_seed + number afterwards.
        number: of the worker.
    """
    random.seed(base_seed + number)
    # Where torch knows of accelerators, their seeding is put off together with a traceback, which takes milliseconds.
    seed_torch = torch.default_generator if torch.accelerator.current_accelerator() is None else torch
    seed_torch.manual_seed(base_seed + number)
    # NumPy gets words of its own, or its generator and Python's, which are the same kind, would be one stream.
    words = np.random.SeedSequence([number, base_seed & 0xFFFFFFFF, base_seed >> 32, 0]).generate_state(4)
    np.random.seed(words)
