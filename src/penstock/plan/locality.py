"""`Locality`: the assignment of shards to nodes in a share's order (``locality="node"``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.distributed import World, node_count
from penstock.errors import ConfigError, StateError
from penstock.order.nodes import Nodes, NodeShuffle
from penstock.order.permutation import Indices
from penstock.plan.cursor import read_ints

if TYPE_CHECKING:
    from penstock.plan.share import MiniEpoch, SharePlan

__all__ = ["Locality"]


class Locality:
    """Assigns the shards of a source, or blocks of its rows, to nodes.

    Args:
        shuffle: of the share.
        nodes, world_size: arguments of the dataset; None takes those of the job.
        by_shards: whether the source's ``starts`` are the first rows of its shards.

    Raises:
        ConfigError: shuffle is "none", or nodes does not divide the number of ranks.
    """

    def __init__(self, shuffle: str, nodes: int | None, world_size: int | None, *, by_shards: bool) -> None:
        if shuffle == "none":
            raise ConfigError(
                "locality='node' assigns shards to nodes in its own order, but shuffle='none' means the order of the "
                "file: use shuffle='block' or 'global', or leave locality= out"
            )
        self._nodes, self._by_shards = nodes, by_shards
        # From the process that pickled this: a number of ranks, and the number of nodes that they run on.
        self._noted: Nodes | None = None
        if nodes is not None and (nodes < 1 or (world_size is not None and world_size % nodes)):
            raise _uneven(nodes, world_size)

    def layout(self, place: MiniEpoch, world: World) -> Nodes:
        """Return the nodes and ranks of the order at a place.

        Raises:
            ConfigError: the number of nodes is unknown, or does not divide the number of ranks.
        """
        if place.nodes:
            return Nodes(place.nodes, place.ranks)
        if self._nodes is None and self._noted is not None and self._noted.ranks == world.world_size:
            return self._noted
        nodes = node_count(world) if self._nodes is None else self._nodes
        if world.world_size % nodes:
            raise _uneven(nodes, world.world_size)
        return Nodes(nodes, world.world_size)

    def note(self, world: World | None) -> None:
        """Note the number of nodes, for processes that cannot find it and have as many ranks."""
        if self._nodes is None and world is not None:
            self._noted = Nodes(node_count(world), world.world_size)

    def order(self, plan: SharePlan, place: MiniEpoch) -> NodeShuffle:
        """Return the order at a place."""
        return NodeShuffle(
            place.samples,
            self.layout(place, plan.world),
            seed=plan.seed,
            epoch=place.epoch,
            kind=plan.shuffle,
            starts=self._starts(plan, place.samples),
            **plan.block,
        )

    def _starts(self, plan: SharePlan, samples: int) -> Indices | None:
        """Return the first sample of each shard, then ``samples``, counted among the rows that the filters keep."""
        if not self._by_shards:
            return None
        starts: Indices | None = np.asarray(plan.source.starts, np.int64)
        for kept in plan.filters:
            starts = None if starts is None else kept.before(starts)
        # If the source has grown, an epoch that began before that has only the older shards.
        return None if starts is None else np.append(starts[starts < samples], samples)

    def read(self, state: Mapping[str, Any]) -> Nodes:
        """Return the nodes and ranks of a state's order.

        Raises:
            StateError: they are missing or damaged.
        """
        nodes, ranks = read_ints(state, "nodes", 2, of="dataset")
        if nodes < 1 or ranks < 1 or ranks % nodes:
            raise StateError(f"this state is damaged: it has {ranks} ranks on {nodes} nodes")
        return Nodes(nodes, ranks)


def _uneven(nodes: int, ranks: int | None) -> ConfigError:
    job = "" if ranks is None else f" for {ranks} ranks"
    return ConfigError(
        f"locality='node' needs equally many ranks on each node, got nodes={nodes}{job}: pass a positive number of "
        "nodes that divides the number of ranks"
    )
