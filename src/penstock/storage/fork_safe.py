"""`obstore`: the library obstore, also in a process that was forked from one that has used it.

Rust's runtime has threads, which no fork copies, so every call would hang. So a forked child loads the library again,
from a copy in memory (15 MB), which the linker takes for another library. On Linux only.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

from penstock.errors import StorageError

__all__ = ["obstore"]

_LIBRARY = "obstore._obstore"
_loaded: dict[int, Any] = {}  # the module of this process, and those of its parents
_left_behind: list[Any] = []  # modules of parents, which must neither be freed nor used
_locks: dict[int, threading.Lock] = {}  # a thread of the parent may have held the lock of the parent


def obstore() -> Any:
    """Return the module obstore, in a form that works in this process.

    Raises:
        ImportError: it is not installed.
        StorageError: this process was forked, and the system cannot load the library again.
    """
    here = os.getpid()
    with _locks.setdefault(here, threading.Lock()):
        if here not in _loaded:
            if _loaded:
                _load_again(list(_loaded.values())[-1]._obstore.__file__)
            importlib.import_module("obstore.store")
            _loaded[here] = importlib.import_module("obstore")
    return importlib.import_module("obstore")


def _load_again(path: str) -> None:
    """Import the library from a copy of a file, whose name is unique while the copy is open."""
    _left_behind.extend(sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "obstore")
    try:
        copy = os.memfd_create("obstore")
        with open(path, "rb") as source, open(copy, "wb", closefd=False) as target:
            target.write(source.read())
        where = f"/proc/self/fd/{copy}"
        spec = spec_from_file_location(_LIBRARY, where, loader=ExtensionFileLoader(_LIBRARY, where))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[_LIBRARY] = module_from_spec(spec)
        spec.loader.exec_module(sys.modules[_LIBRARY])
    except (AttributeError, ImportError, OSError) as error:
        raise StorageError(
            "this process was forked from one that has used obstore, and its library cannot be loaded again "
            f"({error}): start workers with multiprocessing_context='forkserver'"
        ) from error
