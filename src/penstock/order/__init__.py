"""The order of samples, and who gets which: pure functions of a few integers, without torch.

* `permutation`: a keyed bijection on ``[0, n)`` in constant memory.
* `shuffle`: ``global``, ``block`` and ``none``, built on it.
* `nodes`: shards that are dealt to nodes, each of which keeps most of its own; on `uneven`, blocks of any sizes.
* `mixture`: which source of a mixture stands at a position, built on `digits`, a permutation that counts.
* `partition`: which positions of an epoch belong to a rank and a mini-epoch.

Invariant: an order knows nothing of ranks and workers, a partition knows nothing of the order. So a job may stop on 8
ranks and go on with 6, and the number of workers never shows in the data. `NodeShuffle` alone follows from how many
nodes and ranks an epoch began with, which a state says; what is left of that order is dealt to any number of ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock import lazy
from penstock.hashing import derive_key
from penstock.order.partition import Partition
from penstock.order.permutation import ORDER_VERSION, Permutation
from penstock.order.shuffle import SHUFFLES, BlockShuffle, Order, make_order

__all__ = [
    "ORDER_VERSION",
    "SHUFFLES",
    "BlockShuffle",
    "NodeShuffle",
    "Nodes",
    "Order",
    "Partition",
    "Permutation",
    "derive_key",
    "make_order",
]

if TYPE_CHECKING:
    from penstock.order.nodes import Nodes, NodeShuffle

__getattr__, __dir__ = lazy.names(__name__, {"NodeShuffle": "nodes", "Nodes": "nodes"})
