"""How many batches may be in flight: as many as a share of the object stores holds, so that nothing is spilled to disk.

Batches lie in the store of the node that made them until they are pulled, and then in that of this program's node until
they are copied out. Half of a store belongs to other users, and some to what Ray keeps a moment longer.
"""

from __future__ import annotations

from penstock.loader.sizes import RecentSizes

__all__ = ["Budget"]

_SHARE = 0.3


class Budget:
    """Bytes of batches, begun or ready.

    Args:
        store: bytes of the object store of this program's node.
        max_bytes: that the user allows; None for no limit of theirs.
    """

    def __init__(self, store: int, max_bytes: int | None) -> None:
        share = int(store * _SHARE)
        self._bytes = share if max_bytes is None else min(share, max_bytes)
        self._sizes = RecentSizes()

    @property
    def largest(self) -> int:
        """Bytes of the largest of the last batches, 0 until there was one."""
        return self._sizes.largest

    def learn(self, nbytes: int) -> None:
        """A batch was so large."""
        self._sizes.add(nbytes)

    def depth(self, wanted: int, nodes: int) -> int:
        """Batches in flight, at least one; one a node until a first one has told how large they are."""
        if not self.largest:
            return max(1, min(wanted, nodes))
        return max(1, min(wanted, self._bytes // self.largest))

    def on_node(self, store: int) -> int:
        """Batches that one node may make or keep at a time."""
        return max(1, int(store * _SHARE) // self.largest) if self.largest else 1
