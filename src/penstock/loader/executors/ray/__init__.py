"""The Ray executor: make batches on other machines, bit for bit the same.

    requests -> RayBatches -- direct method calls --> actor (Worker), threads inside      on any node of the cluster
                 ^                                   |
                 `---- object store: one copy in, one copy out into reused memory

A loader keeps a `RayBackend`; Ray is imported when the first epoch iterator starts.
"""

from penstock.loader.executors.ray.options import RayOptions

__all__ = ["RayOptions"]
