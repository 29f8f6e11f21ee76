"""`NodeShuffle`: the order of an epoch in which each node of a job reads the rows that it read in the last epoch.

The rows are cut into `VIRTUAL_NODES` parts, the same in every epoch, and the positions are dealt to the parts in turn.
In each epoch every part permutes its blocks of consecutive rows, and the rows of each block::

    position   0    1    2   ...  191  192  193  ...
    part       17   84   3   ...  9    17   84   ...     a permutation that depends only on the seed

Positions are split among ranks in strides. So if the number of ranks divides `VIRTUAL_NODES`, each rank reads the same
parts in every epoch, and so does each node.

Invariant: a bijection of ``range(n)`` that depends only on (n, seed, epoch, block_size), not on ranks.
"""

from __future__ import annotations

import numpy as np

from penstock.hashing import derive_key, mix
from penstock.order.classes import ClassShuffle
from penstock.order.permutation import Bijection, Indices, Permutation

__all__ = ["VIRTUAL_NODES", "NodeShuffle"]

VIRTUAL_NODES = 192
"""Number of parts: a multiple of the numbers of ranks that jobs often have."""

_FEWEST_ROWS = 64
"""Smaller parts would not be shuffled well."""


class NodeShuffle(Bijection):
    """The order of an epoch that deals parts of the rows to nodes.

    Args:
        n: number of samples. Fewer than 12,288 are shuffled globally.
        seed, epoch: choose the order together; the parts depend only on the seed.
        block_size: number of consecutive rows that are read together; None: a whole part. Blocks begin at multiples of
            ``block_size``, except for the last rows of the data, less than one block for each part.

    Cost: O(1) memory, and look-ups in a few Feistel networks, vectorised.

    >>> rows = NodeShuffle(100_000, block_size=10)[np.arange(100_000)]
    >>> sorted(rows.tolist()) == list(range(100_000))
    True
    >>> after = NodeShuffle(100_000, epoch=1, block_size=10)[np.arange(100_000)]
    >>> set(rows[::4].tolist()) == set(after[::4].tolist())  # the positions of one rank of four
    True
    """

    def __init__(self, n: int, *, seed: int = 0, epoch: int = 0, block_size: int | None = None) -> None:
        self.n = n
        self._parts = VIRTUAL_NODES if n >= VIRTUAL_NODES * _FEWEST_ROWS else 1
        turns = np.arange(self._parts, dtype=np.int64)
        # Rows of a part; the parts of the first turns have one more.
        self._size, longer = divmod(n, self._parts)
        whole = self._size + 1
        self._block = whole if block_size is None or self._parts == 1 else min(block_size, whole)
        self._full = self._size // self._block
        # Each part has `_full` blocks, and a last one with these rows.
        self._last: Indices = self._size - self._full * self._block + (turns < longer)
        self._part_of = Permutation(self._parts, derive_key(seed, 0, "home"))
        key = derive_key(seed, epoch, "nodes")
        self._rows_key = mix(key, 1)
        begins = np.arange(self._parts + 1, dtype=np.int64) * (self._full + 1)
        self._blocks = ClassShuffle(begins, mix(key, 0))
        self._last_slot = self._blocks.inverse[begins[:-1] + self._full] - begins[:-1]

    def _rows(self, positions: Indices) -> Indices:
        places, turns = np.divmod(positions, self._parts)
        # As if all blocks were full.
        last = self._last[turns]
        places += (self._block - last) * (places >= self._last_slot[turns] * self._block + last)
        slots, offsets = np.divmod(places, self._block)
        begins = turns * (self._full + 1)
        blocks = self._blocks[begins + slots] - begins
        places = blocks * self._block + self._within_blocks(turns, blocks, offsets, inverse=False)
        # The data begin with the full blocks of part after part. Then come the last blocks, then single rows.
        full = self._full * self._block
        parts, rest = self._part_of[turns], self._size - full
        rows = np.where(places < full, parts * full + places, self._parts * full + parts * rest + places - full)
        return np.where(places < self._size, rows, self._parts * self._size + turns)

    def _find(self, rows: Indices) -> Indices:
        full = self._full * self._block
        rest, behind = self._size - full, rows - self._parts * full
        parts = np.where(behind < 0, rows // max(1, full), behind // max(1, rest))
        places: Indices = np.where(behind < 0, rows - parts * full, behind - parts * rest + full)
        single = rows - self._parts * self._size
        turns = np.where(single < 0, self._part_of.inverse[np.where(single < 0, parts, 0)], single)
        places = np.where(single < 0, places, self._size)
        blocks, offsets = np.divmod(places, self._block)
        begins = turns * (self._full + 1)
        slots = self._blocks.inverse[begins + blocks] - begins
        places = slots * self._block + self._within_blocks(turns, blocks, offsets, inverse=True)
        places -= (self._block - self._last[turns]) * (slots > self._last_slot[turns])
        return places * self._parts + turns

    def _within_blocks(self, turns: Indices, blocks: Indices, offsets: Indices, *, inverse: bool) -> Indices:
        """Return the shuffled offsets of rows in their blocks."""
        sizes = np.where(blocks < self._full, self._block, self._last[turns])
        numbers, first, which = np.unique(turns * (self._full + 1) + blocks, return_index=True, return_inverse=True)
        starts: Indices = np.concatenate([[0], np.cumsum(sizes[first])])
        shuffle = ClassShuffle(starts, self._rows_key, numbers=numbers)
        begins: Indices = starts[which]
        shuffled: Indices = shuffle.inverse[begins + offsets] if inverse else shuffle[begins + offsets]
        return shuffled - begins
