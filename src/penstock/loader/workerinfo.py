"""``torch.utils.data.get_worker_info()`` in our workers, including threads. The only module that modifies torch.

torch stores the result in one module variable, which worker processes may set but threads would share. So the *code* of
torch's function is replaced once, when one of our workers first needs it. Names imported earlier (``from
torch.utils.data import get_worker_info``) then follow. The function returns this thread's info if it is a worker,
otherwise torch's variable: None in the main thread, and torch's own value in torch's workers.

In our workers, only torch's ``default_collate`` gets None. It would otherwise put every tensor into a shared memory
segment with a file descriptor, for a transfer that does not take place.

Tested with the installed torch. If its internals are not as expected, a warning is emitted and threads get None.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import warnings
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils import collate as _torch_collate
from torch.utils.data._utils import worker as _torch_worker

__all__ = ["enter", "expected", "process_worker", "seed_worker", "thread_worker"]


class _Local(threading.local):
    """Data of the replaced function. Class attributes are shared by all threads."""

    # Info of this thread, if it is a worker.
    info: Any = None
    # Info of this process, if it is one of our workers.
    process: Any = None
    frame = staticmethod(sys._getframe)
    collate = vars(_torch_collate)


_penstock = _Local()
# A placeholder: the code below looks up both names in torch's module.
_worker_info: Any = None
_installing = threading.Lock()
_installed = False


def _answer() -> Any:
    """Replacement for torch's ``get_worker_info``, which runs in the namespace of torch's module."""
    info = _penstock.info
    if info is None:
        info = _worker_info
        if info is None or info is not _penstock.process:
            return info
    return None if _penstock.frame(1).f_globals is _penstock.collate else info


def expected() -> bool:
    """Return whether torch's function has the expected form: it returns one variable of its module."""
    function = _torch_worker.get_worker_info
    code = getattr(function, "__code__", None)
    return (
        code is not None
        and code.co_names == ("_worker_info",)
        and not code.co_freevars
        and not code.co_argcount
        and function.__globals__ is vars(_torch_worker)
    )


def enter(info: Any) -> None:
    """Set the worker info of this thread, permanently. None removes it."""
    global _installed
    if not _installed:
        with _installing:
            known = _installed or expected()
            if known and not _installed:
                vars(_torch_worker)["_penstock"] = _penstock
                # Windows has threads but no forks.
                if hasattr(os, "register_at_fork"):
                    # A fork from a worker thread contains only that thread, which is not our worker any more.
                    os.register_at_fork(after_in_child=partial(setattr, _penstock, "info", None))
                _torch_worker.get_worker_info.__code__ = _answer.__code__
            _installed = True
        if not known:
            warnings.warn(
                f"torch {torch.__version__} implements get_worker_info() in a way unknown to Penstock: it returns None "
                "in threads. Use executor='process' if your dataset needs it",
                RuntimeWarning,
                stacklevel=3,
            )
    _penstock.info = info


def thread_worker(number: int, num_workers: int, seed: int, dataset: Any, method: str = "thread") -> Any:
    """Return torch's ``WorkerInfo`` for a thread, read-only as in torch.

    Args:
        seed: seed of this worker; torch's rule is base seed + number.
        dataset: the dataset that all threads share.
        method: torch's name for the kind of worker.
    """
    fields: dict[str, Any] = {"id": number, "num_workers": num_workers, "seed": seed, "dataset": dataset}
    # Only newer versions of torch have this field.
    if "worker_method" in getattr(_torch_worker.WorkerInfo, "__dataclass_fields__", {}):
        fields["worker_method"] = method
    return _torch_worker.WorkerInfo(**fields)


def process_worker(number: int, num_workers: int, seed: int, dataset: Any) -> Any:
    """Make this process a worker in all its threads. Call it once, in the worker process.

    Args:
        seed: seed of this worker; torch's rule is base seed + number.
        dataset: this worker's copy.

    Returns:
        torch's ``WorkerInfo``.
    """
    enter(None)
    info = thread_worker(number, num_workers, seed, dataset, "multiprocessing")
    _Local.process = info
    _torch_worker._worker_info = info
    return info


def seed_worker(base_seed: int, number: int) -> None:
    """Seed the global generators of Python, torch and NumPy as torch does in its worker processes.

    Args:
        base_seed: base seed of the iterator, below 2**64; ``torch.initial_seed()`` is then base_seed + number.
        number: number of the worker.
    """
    random.seed(base_seed + number)
    # If torch finds an accelerator, it defers seeding together with a traceback, which takes milliseconds.
    seed_torch = torch.default_generator if torch.accelerator.current_accelerator() is None else torch
    seed_torch.manual_seed(base_seed + number)
    # NumPy gets other words. With the same seed its generator and Python's, which are of the same kind, would be one
    # stream.
    words = np.random.SeedSequence([number, base_seed & 0xFFFFFFFF, base_seed >> 32, 0]).generate_state(4)
    np.random.seed(words)
