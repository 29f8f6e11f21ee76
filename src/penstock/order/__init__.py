"""The order of samples and their partition among ranks: pure functions of a few integers, without torch.

* `permutation`: a keyed bijection on ``[0, n)`` in constant memory.
* `shuffle`: the orders ``global``, ``block`` and ``none``, built on it.
* `nodes`: an order in which each node reads mostly the same shards in every epoch, built on `uneven` (blocks of any
  sizes).
* `mixture`: the source of a mixture at each position, built on `digits`, a permutation that counts.
* `partition`: the positions of an epoch that belong to a rank and a mini-epoch.

Invariant: an order does not depend on ranks and workers, and a partition does not depend on the order. So a job may
stop on 8 ranks and resume on 6, and the number of workers never changes the data. `NodeShuffle` is the only exception:
it depends on the numbers of nodes and ranks at the start of an epoch, which the state holds. The rest of its epoch can
be split among any number of ranks.
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
