"""The Ray executor: batches made on other machines, bit for bit the same.

    requests -> RayBatches -- direct method calls --> actor (Worker), threads inside      on any node of the cluster
                 ^                                   |
                 `---- object store: one copy in, one copy out into reused memory

`RayExecutor` is what a loader keeps; Ray itself is imported when the first pass begins.
"""

from penstock.loader.executors.ray.options import RayOptions

__all__ = ["RayOptions"]
