"""Use obstore in this process and in processes forked from it.

obstore runs threads of Rust's runtime. A forked child does not have them, so every call would hang there. So a child
loads the library again, from a copy that the linker treats as another library. The parent makes the copy in memory
before its first fork, and its children share it. If obstore was not imported before the fork, no copy is made.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import spec_from_file_location
from typing import Any

from penstock.errors import StorageError

__all__ = ["obstore"]

_LIBRARY = "obstore._obstore"
_lock = threading.Lock()
_copy: int | OSError | None = None  # an open file for the children of this process
_given: int | OSError | None = None  # the parent's copy, for this process
_stale = False  # whether the imported library belongs to a parent
_of_parents: list[Any] = []  # modules of parents, which must neither be freed nor used


def obstore() -> Any:
    """Return the module obstore, in a form that works in this process.

    Raises:
        ImportError: it is not installed.
        StorageError: this process was forked without a copy of the library.
    """
    global _stale
    with _lock:
        if _stale:
            _load(_given)
            _stale = False
        importlib.import_module("obstore.store")
        return importlib.import_module("obstore")


class _Finder:
    """Finds the library in an open file, whose name is unique while it is open."""

    def __init__(self, file: int) -> None:
        self._path = f"/proc/self/fd/{file}"

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != _LIBRARY:
            return None
        return spec_from_file_location(name, self._path, loader=ExtensionFileLoader(name, self._path))


def _load(file: int | OSError | None) -> None:
    """Import obstore again, from this file."""
    if not isinstance(file, int):
        raise StorageError(
            "this process was forked from one that has used obstore, and its library cannot be loaded again"
            f"{f' ({file})' if file else ''}: start workers with multiprocessing_context='spawn'"
        ) from file
    names = [name for name in sys.modules if name.partition(".")[0] == "obstore"]
    _of_parents.extend(sys.modules.pop(name) for name in names)
    finder: Any = _Finder(file)
    sys.meta_path.insert(0, finder)
    try:
        importlib.import_module("obstore")
    except (ImportError, OSError) as error:
        raise StorageError(
            f"obstore's library cannot be loaded again in a forked process ({error}): start workers with "
            "multiprocessing_context='spawn'"
        ) from error
    finally:
        sys.meta_path.remove(finder)


def _before_fork() -> None:
    """Make the copy for child processes, once."""
    global _copy
    library = sys.modules.get(_LIBRARY)
    if library is None or _stale or _copy is not None:
        return
    try:
        with open(str(library.__file__), "rb") as source:
            _copy = os.memfd_create("obstore")
            left = os.fstat(source.fileno()).st_size
            while left:
                left -= os.sendfile(_copy, source.fileno(), None, left)
    except (OSError, AttributeError) as error:  # a system without memfd_create, or no memory
        _copy = error if isinstance(error, OSError) else OSError(str(error))


def _after_fork() -> None:
    global _copy, _given, _stale, _lock
    _lock = threading.Lock()
    if _LIBRARY in sys.modules and not _stale:
        _given, _copy, _stale = _copy, None, True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork)
