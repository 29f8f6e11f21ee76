"""Limit the batches in flight to a share of the object stores, so that nothing is spilled to disk.

A batch is in the store of the node that made it until it is fetched, then in the store of this program's node until it
is copied out. Half of a store is left to other users, and some to objects that Ray frees a little later.
"""

from __future__ import annotations

from penstock.loader.sizes import RecentSizes

__all__ = ["Budget"]

_SHARE = 0.3


class Budget:
    """The budget of bytes for batches in progress or ready.

    Args:
        store: bytes of the object store of this program's node.
        max_bytes: the user's limit; None for no limit.
    """

    def __init__(self, store: int, max_bytes: int | None) -> None:
        share = int(store * _SHARE)
        self._bytes = share if max_bytes is None else min(share, max_bytes)
        self._sizes = RecentSizes()

    @property
    def largest(self) -> int:
        """Bytes of the largest recent batch, 0 before the first."""
        return self._sizes.largest

    def learn(self, nbytes: int) -> None:
        """Record the size of a batch."""
        self._sizes.add(nbytes)

    def depth(self, wanted: int, nodes: int) -> int:
        """Return how many batches may be in flight, at least one; one per node until their size is known."""
        if not self.largest:
            return max(1, min(wanted, nodes))
        return max(1, min(wanted, self._bytes // self.largest))

    def on_node(self, store: int) -> int:
        """Return how many batches one node may make or hold at a time."""
        return max(1, int(store * _SHARE) // self.largest) if self.largest else 1
