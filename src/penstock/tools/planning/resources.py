"""Memory of each process and node, the index on disk, start-up and resume."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.loader.executors.process.ring import LIGHT, slots_for
from penstock.manifest.sidecar import Header
from penstock.tools.planning.job import Assumptions, Job

__all__ = ["LIGHT_FACTOR", "Memory", "StartUp", "memory_of", "start_up_of"]

LIGHT_FACTOR = 8
"""Times as many batches are made ahead if they are small: what `penstock.loader` does where nobody says how many."""


@dataclass(frozen=True)
class Memory:
    """Bytes, as they are counted in decision and documentation: private memory, the ring and mapped files apart.

    Attributes:
        rank: private, of a rank's process without its model.
        worker: private, of each of its workers.
        slot_bytes, slots: of the ring that a rank shares with its workers: batches in flight, and those it holds.
        ring: all of it.
        index_bytes: of the index beside the manifest (the sidecar): 8 bytes a row. Mapped.
        manifest_bytes: of the manifest's file. Mapped.
        node: private memory and rings of all ranks of a full node.
        node_mapped: manifest and index, once for all processes of the node. Pages that the system drops when it needs
            the memory, and reads again.
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
    """Seconds.

    Attributes:
        index: to index the manifest, once, before or at the first start.
        first_batch: to make the first batch: one worker makes it whole, and reads it over a rank's part of the storage.
        start: from the start of a program to its first batch, with an index.
        resume: the same in the middle of an epoch: position and order are arithmetic, nothing is read again.
        replay: what a loader without positions needs on top, on average: half an epoch is made and thrown away.
    """

    index: float
    first_batch: float
    start: float
    resume: float
    replay: float


def memory_of(job: Job, assumed: Assumptions) -> Memory:
    """Memory of processes and nodes, and the size of the index.

    The ring's slots are the loader's own (`slots_for` in `loader/executors/process/ring.py`), for worker processes and
    batches that come as one tensor. Workers that run ahead of a slow one may take 32 MiB more. The index's size is that
    of its format.

    >>> memory_of(Job(samples=10, sample_bytes=1000), Assumptions()).index_bytes
    216
    """
    depth = job.workers * job.prefetch
    batch = job.out_bytes * min(job.batch_size, job.samples)
    slot_bytes, slots = slots_for(batch, depth, depth * LIGHT_FACTOR if batch <= LIGHT else depth)
    ring = slot_bytes * slots
    index = Header(0, job.samples, 0, 0, 0, b"").length
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
    """Start-up and resume.

    Args:
        epoch_s: what a cold epoch takes.
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
