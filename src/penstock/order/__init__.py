"""The order of samples and their partition among ranks: pure functions of a few integers, without torch.

* `permutation`: a keyed bijection on ``[0, n)`` in constant memory.
* `shuffle`: the orders ``global``, ``block`` and ``none``, built on it.
* `nodes`: an order in which each node reads the same rows in every epoch.
* `mixture`: the source of a mixture at each position, also with weights that change.
* `partition`: the positions of an epoch that belong to a rank and a mini-epoch.

Invariant: an order does not depend on ranks and workers, and a partition does not depend on the order. So a job may
stop on 8 ranks and resume on 6, and the number of workers never changes the data.
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
    "Order",
    "Partition",
    "Permutation",
    "derive_key",
    "make_order",
]

if TYPE_CHECKING:
    from penstock.order.nodes import NodeShuffle

__getattr__, __dir__ = lazy.names(__name__, {"nodes": ["NodeShuffle"]})
