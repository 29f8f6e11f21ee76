"""`Peer`: a cache closer than the store, tried first for copies of objects."""

from __future__ import annotations

from typing import Protocol

from penstock.storage.backend import Cancel

__all__ = ["Peer"]


class Peer(Protocol):
    """The interface that `penstock.storage.Storage` uses: `penstock.server.CacheClient`. Thread-safe and picklable."""

    def read(self, key: str, begin: int, target: memoryview, cancel: Cancel) -> int:
        """Fill a buffer with a copy's bytes from ``begin`` on; return the number of bytes read from the front.

        Args:
            key: the name of the copy, for one version of one object; see `penstock.storage.Cache.key`.
            begin: the first byte.
            target: the buffer to fill.
            cancel: aborts the read from another thread.

        Never raises if the peer is gone, hangs, fails or has no such copy: it returns fewer bytes.
        """
