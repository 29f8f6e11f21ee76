"""`Peer`: somebody nearer than the store who may have a copy of an object, asked before the store is."""

from __future__ import annotations

from typing import Protocol

from penstock.storage.backend import Cancel

__all__ = ["Peer"]


class Peer(Protocol):
    """What `penstock.storage.Storage` asks: `penstock.server.CacheClient`. Safe in threads, picklable."""

    def read(self, key: str, begin: int, target: memoryview, cancel: Cancel) -> int:
        """Fill a buffer with a copy's bytes from ``begin`` on; return how many were had from the front.

        Args:
            key: the copy's name, which is that of one version of one object, see `penstock.storage.Cache.key`.
            begin: the first byte.
            target: where they go.
            cancel: given up from another thread.

        Never raises for a peer that is gone, hangs, fails or has no such copy: it returns fewer bytes.
        """
