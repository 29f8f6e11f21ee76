"""Clusters on this machine, and loaders over them, for the benchmarks that need Ray."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import penstock as ps

__all__ = ["cluster", "joined", "ours"]


@contextlib.contextmanager
def cluster(nodes: int = 1, cpus: int = 2, store: int = 600 << 20) -> Iterator[Any]:
    """A head without CPUs, and nodes, on this machine."""
    import ray
    from ray.cluster_utils import Cluster

    head = {"num_cpus": cpus if nodes == 1 else 0, "object_store_memory": store, "include_dashboard": False}
    found = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(nodes if nodes > 1 else 0):
            found.add_node(num_cpus=cpus, object_store_memory=store)
        ray.init(address=found.address, configure_logging=False, log_to_driver=False)
        yield found
    finally:
        ray.shutdown()
        found.shutdown()


def ours(data: Any, batch_size: int, workers: int, **options: Any) -> ps.DataLoader[Any]:
    """A loader on the cluster."""
    ray_options = ps.RayOptions(**options.pop("ray_options", {}))
    how = {"persistent_workers": True, "executor": "ray", "ray_options": ray_options, **options}
    return ps.DataLoader(data, batch_size, num_workers=workers, **how)


def joined(loader: ps.DataLoader[Any]) -> int:
    """How many workers have started."""
    return sum(int(node["workers"]) for node in loader.stats()["nodes"].values())
