"""`Locality`: the part of a share's order that deals shards to nodes (``locality="node"``)."""

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
    """Deals the shards of a source, or blocks of its rows, to nodes.

    Args:
        shuffle: of the share.
        nodes, world_size: as the data set was given them; None for those of the job.
        by_shards: whether the source's ``starts`` are the first rows of its shards.

    Raises:
        ConfigError: a shuffle that has no order to choose, or nodes that do not divide the ranks.
    """

    def __init__(self, shuffle: str, nodes: int | None, world_size: int | None, *, by_shards: bool) -> None:
        if shuffle == "none":
            raise ConfigError(
                "locality='node' deals shards to nodes in an order of its own, and shuffle='none' asks for the order "
                "of the file: use shuffle='block' or 'global', or leave locality= out"
            )
        self._nodes, self._by_shards = nodes, by_shards
        if nodes is not None and (nodes < 1 or (world_size is not None and world_size % nodes)):
            raise _uneven(nodes, world_size)

    def layout(self, place: MiniEpoch, world: World) -> Nodes:
        """Return the nodes and ranks that the order at a place deals to.

        Raises:
            ConfigError: nobody says how many nodes there are, or they do not divide the ranks.
        """
        if place.nodes:
            return Nodes(place.nodes, place.ranks)
        nodes = node_count(world) if self._nodes is None else self._nodes
        if world.world_size % nodes:
            raise _uneven(nodes, world.world_size)
        return Nodes(nodes, world.world_size)

    def settle(self, world: World) -> None:
        """Find out how many nodes there are, and stay with that."""
        if self._nodes is None:
            self._nodes = node_count(world)

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
        """Return the first of so many samples in each shard, as the filters count them."""
        if not self._by_shards:
            return None
        starts: Indices | None = np.asarray(plan.source.starts, np.int64)
        for kept in plan.filters:
            starts = None if starts is None else kept.before(starts)
        # Of a source that has grown, an epoch that began before has the shards from then.
        return None if starts is None else np.append(starts[starts < samples], samples)

    def read(self, state: Mapping[str, Any]) -> Nodes:
        """Return the nodes and ranks of a state's order.

        Raises:
            StateError: they are missing or damaged.
        """
        nodes, ranks = read_ints(state, "nodes", 2, of="data set")
        if nodes < 1 or ranks < 1 or ranks % nodes:
            raise StateError(f"this state is damaged: it deals rows to {ranks} ranks on {nodes} nodes")
        return Nodes(nodes, ranks)


def _uneven(nodes: int, ranks: int | None) -> ConfigError:
    lie = "" if ranks is None else f", and there are {ranks} ranks"
    return ConfigError(
        f"locality='node' needs equally many ranks on each node, got nodes={nodes}{lie}: give a positive number of "
        "nodes that divides the ranks"
    )
