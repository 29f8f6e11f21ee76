"""Memory of each process and node, the index on disk, start-up and resume."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.loader.sizes import AHEAD, LIGHT, LIGHT_FACTOR, PAGE
from penstock.manifest.sidecar import SidecarHeader
from penstock.tools.planning.job import Assumptions, Job

__all__ = ["Memory", "StartUp", "memory_of", "start_up_of"]

_HELD = 3
"""Batches that a consumer holds: the current, the previous, and one more."""


@dataclass(frozen=True)
class Memory:
    """Memory in bytes: private memory, the ring and mapped files are counted separately.

    Attributes:
        rank: private memory of a rank's process without its model.
        worker: private memory of each worker.
        slot_bytes, slots: size and number of slots in the ring of a rank and its workers: batches in flight, and
            batches that the rank holds.
        ring: size of the ring.
        index_bytes: size of the manifest's index (the sidecar): 8 bytes a row. Mapped.
        manifest_bytes: size of the manifest's file. Mapped.
        node: private memory and rings of all ranks of a full node.
        node_mapped: manifest and index, once for all processes of the node. The system may drop these pages when it
            needs memory, and read them again.
    """

    rank: int
    worker: int
    slot_bytes: int
    slots: int
    ring: int
    index_bytes: int
    manifest_bytes: int
    node: int
    node_mapped: int


@dataclass(frozen=True)
class StartUp:
    """Times of start-up and resume in seconds.

    Attributes:
        index: indexing the manifest, once, before or at the first start.
        first_batch: building the first batch, by one worker with a rank's part of the storage bandwidth.
        start: from the start of a program to its first batch, with an index.
        resume: the same in the middle of an epoch. The order is computed, and no sample is read again.
        replay: mean extra time of a loader that must replay the epoch up to its position: half an epoch.
    """

    index: float
    first_batch: float
    start: float
    resume: float
    replay: float


def memory_of(job: Job, assumed: Assumptions) -> Memory:
    """Return the memory of processes and nodes, and the size of the index.

    The ring has a slot for each batch in flight (`loader/flow.py` says how many) and for three that the consumer holds,
    with worker processes and batches of one tensor. Workers ahead of a slow one may take 32 MiB more.

    >>> memory_of(Job(samples=10, sample_bytes=1000), Assumptions()).index_bytes
    216
    """
    depth = job.workers * job.prefetch
    batch = job.out_bytes * min(job.batch_size, job.samples)
    slot_bytes = -(-batch // PAGE) * PAGE
    light = depth * LIGHT_FACTOR if batch <= LIGHT else depth
    slots = max(depth, min(light, AHEAD // slot_bytes)) + _HELD
    ring = slot_bytes * slots
    index = SidecarHeader(0, job.samples, 0, 0, 0, b"").length
    return Memory(
        rank=assumed.rank_memory,
        worker=assumed.worker_memory,
        slot_bytes=slot_bytes,
        slots=slots,
        ring=ring,
        index_bytes=index,
        manifest_bytes=job.manifest_bytes,
        node=job.ranks_here * (assumed.rank_memory + job.workers * assumed.worker_memory + ring),
        node_mapped=index + job.manifest_bytes,
    )


def start_up_of(job: Job, assumed: Assumptions, *, epoch_s: float) -> StartUp:
    """Return the times of start-up and resume.

    Args:
        job, assumed: the run and the assumptions.
        epoch_s: duration of an epoch with an empty cache.
    """
    bandwidths = [job.node_bandwidth, job.total_bandwidth and job.total_bandwidth / job.nodes]
    bandwidth = min((given for given in bandwidths if given), default=None)
    samples = min(job.batch_size, job.samples)
    reading = samples * job.read_rows * job.sample_bytes * job.ranks_here / bandwidth if bandwidth else 0.0
    first = samples * job.cpu_s + reading
    start = assumed.import_s + assumed.open_s + assumed.workers_s + first
    return StartUp(
        index=job.manifest_bytes / assumed.index_rate,
        first_batch=first,
        start=start,
        resume=start,
        replay=epoch_s / 2,
    )
