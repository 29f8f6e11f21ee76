"""A mapped part of the shared file: the memory of a slot, or of the board.

Python's `mmap` keeps a descriptor for each map, which a ring of many slots cannot afford. So this uses the system
calls.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Region", "paged"]

_PAGE = mmap.ALLOCATIONGRANULARITY
_FAILED = 2 ** (8 * ctypes.sizeof(ctypes.c_void_p)) - 1


def paged(nbytes: int) -> int:
    """Return a size rounded up to whole pages."""
    return -(-nbytes // _PAGE) * _PAGE


def _system() -> Any:
    """Return the C library; None if it lacks these calls."""
    if os.name != "posix":
        return None
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_int64)
    library.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return library


_library = _system()
_unmap_ours = getattr(_library, "munmap", None)


class _Map:
    """Memory for NumPy, mapped as long as an array refers to it."""

    address: int | None = None  # here, for one whose beginning was interrupted

    def __init__(self, fd: int, begin: int, size: int) -> None:
        access = mmap.PROT_READ | mmap.PROT_WRITE
        self.address = _library.mmap(None, size, access, mmap.MAP_SHARED, fd, begin)
        if self.address in (None, _FAILED):
            self.address = None
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        self.size = size
        self.__array_interface__ = {"data": (self.address, False), "shape": (size,), "typestr": "|u1", "version": 3}

    def __del__(self, _unmap: Any = _unmap_ours) -> None:  # modules may be empty by then
        if self.address is not None:
            _unmap(self.address, self.size)


class Region:
    """A part of the file.

    Args:
        fd: of the file, which may be closed afterwards.
        begin, size: in bytes, of whole pages.

    Attributes:
        memory: uint8 of shape (size,). The map stays while any array or tensor over it is there.

    Raises:
        OSError: the system does not map it.
    """

    can_discard = hasattr(mmap, "MADV_REMOVE")
    """Whether memory can be given back."""

    def __init__(self, fd: int, begin: int, size: int) -> None:
        self.size = size
        self._map = _Map(fd, begin, size)
        self.memory: npt.NDArray[np.uint8] = np.asarray(self._map)

    def discard(self, begin: int = 0) -> None:
        """Give the memory from some page on back to the system. Whoever has it mapped sees zeros.

        Raises:
            OSError: the system does not take it.
        """
        assert self._map.address is not None
        if _library.madvise(self._map.address + begin, self.size - begin, mmap.MADV_REMOVE):
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
