"""The Ray executor: make batches on other machines, bit for bit the same.

    requests -> RayExecutor -- direct method calls --> actor (Worker), threads inside      on any node of the cluster
                 ^                                    |
                 `----- object store: one copy in, one copy out

Ray is imported when the first epoch iterator starts.
"""

from penstock.loader.executors.ray.options import RayOptions

__all__ = ["RayOptions"]
