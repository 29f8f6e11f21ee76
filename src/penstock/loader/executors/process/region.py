"""Map a part of the shared file: the memory of a slot or of the board.

Python's `mmap` keeps a file descriptor open for each map, too many for a ring of many slots. So this module makes the
system calls itself.
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

    address: int | None = None  # a class attribute, in case the constructor was interrupted

    def __init__(self, fd: int, begin: int, size: int) -> None:
        access = mmap.PROT_READ | mmap.PROT_WRITE
        self.address = _library.mmap(None, size, access, mmap.MAP_SHARED, fd, begin)
        if self.address in (None, _FAILED):
            self.address = None
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        self.size = size
        self.__array_interface__ = {"data": (self.address, False), "shape": (size,), "typestr": "|u1", "version": 3}

    def __del__(self, _unmap: Any = _unmap_ours) -> None:  # at exit, module globals may be gone
        if self.address is not None:
            _unmap(self.address, self.size)


class Region:
    """A mapped part of the file.

    Args:
        fd: descriptor of the file; may be closed afterwards.
        begin, size: offset and size in bytes, multiples of the page size.

    Attributes:
        memory: uint8 array of shape (size,). The memory stays mapped while any array or tensor refers to it.

    Raises:
        OSError: the mapping failed.
    """

    can_discard = hasattr(mmap, "MADV_REMOVE")
    """Whether memory can be returned to the system."""

    def __init__(self, fd: int, begin: int, size: int) -> None:
        self.size = size
        self._map = _Map(fd, begin, size)
        self.memory: npt.NDArray[np.uint8] = np.asarray(self._map)

    def discard(self, begin: int = 0) -> None:
        """Return the memory from a page-aligned offset on to the system; all processes that map it then read zeros.

        Raises:
            OSError: the system call failed.
        """
        assert self._map.address is not None
        if _library.madvise(self._map.address + begin, self.size - begin, mmap.MADV_REMOVE):
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
