"""The samples/s that storage, processors and the hand-over allow, the needs of training, and the limit."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.tools.planning.job import Assumptions, Job
from penstock.tools.planning.partition_report import Dealing

__all__ = ["Epoch", "Needs", "epochs_of", "needs_of"]


@dataclass(frozen=True)
class Needs:
    """Needs of a full node so that training never waits; None without ``step_s``.

    Attributes:
        samples_per_s: samples/s of the node.
        bandwidth: bytes per second from storage for the node, with an empty cache.
        bandwidth_cached: the same in the last planned epoch.
        total_bandwidth: bytes per second for all nodes, with an empty cache.
        cores: cores of the node for its workers.
        workers: workers of each rank: cores / ranks, at least one.
    """

    samples_per_s: float | None
    bandwidth: float | None
    bandwidth_cached: float | None
    total_bandwidth: float | None
    cores: float | None
    workers: int | None


@dataclass(frozen=True)
class Epoch:
    """An epoch on a full node.

    Attributes:
        hit_rate: share of sample reads that the cache answers.
        read_bytes: bytes that the node reads from storage.
        amplification: ``read_bytes`` over the bytes of the node's samples.
        ceilings: samples/s of the node that each resource allows: "storage", "CPU", "hand-over", "step"; without those
            that are not set.
        limit: the resource with the lowest ceiling.
        seconds: duration of the epoch.
        waiting: share of the time in which training waits for data.
    """

    hit_rate: float
    read_bytes: float
    amplification: float
    ceilings: dict[str, float]
    limit: str
    seconds: float
    waiting: float


def _bytes_a_sample(job: Job, hit_rate: float) -> float:
    return (1 - hit_rate) * min(job.read_rows, job.samples) * job.sample_bytes


def needs_of(job: Job, hits: tuple[float, ...]) -> Needs:
    """Return the needs of training, from the time of a step.

    Args:
        job: the run.
        hits: hit rates of the cache by epoch, see `penstock.tools.planning.hit_rates`.

    >>> needs_of(Job(samples=10**6, sample_bytes=10**5, batch_size=256, step_s=0.256), (0.0, 0.5)).bandwidth
    100000000.0
    """
    if job.step_s is None:
        return Needs(None, None, None, None, None, None)
    rate = job.ranks_here * job.step_samples / job.step_s
    cores = rate * job.cpu_s
    cold = rate * _bytes_a_sample(job, hits[0])
    return Needs(
        samples_per_s=rate,
        bandwidth=cold,
        bandwidth_cached=rate * _bytes_a_sample(job, hits[-1]),
        total_bandwidth=cold * job.ranks / job.ranks_here,
        cores=cores,
        workers=max(1, -(-round(cores * 1e6) // (job.ranks_here * 1_000_000))),
    )


def epochs_of(job: Job, assumed: Assumptions, dealing: Dealing, hits: tuple[float, ...]) -> tuple[Epoch, ...]:
    """Return each epoch: its limit, its duration and its reads.

    Loading and training overlap, so the slowest resource is the limit. The model assumes that no batch is late.
    """
    return tuple(_epoch(job, assumed, dealing, hit_rate) for hit_rate in hits)


def _epoch(job: Job, assumed: Assumptions, dealing: Dealing, hit_rate: float) -> Epoch:
    ranks, batch = job.ranks_here, job.step_samples
    ceilings = {}
    each = _bytes_a_sample(job, hit_rate)
    bandwidths = [job.node_bandwidth, job.total_bandwidth and job.total_bandwidth * job.share]
    bandwidth = min((given for given in bandwidths if given), default=None)
    if bandwidth is not None and each:
        ceilings["storage"] = bandwidth / each
    workers = job.workers * ranks
    if job.cpu_s:
        ceilings["CPU"] = min(workers, job.cores or workers) / job.cpu_s
    ceilings["hand-over"] = ranks * batch / (assumed.batch_s + batch * job.out_bytes / assumed.hand_over_rate)
    data = min(ceilings.values())
    if job.step_s is not None:
        ceilings["step"] = ranks * batch / job.step_s
    limit = min(ceilings, key=lambda name: (ceilings[name], name != "step"))
    read = dealing.node_samples * each
    samples = dealing.node_samples * job.sample_bytes
    return Epoch(
        hit_rate=hit_rate,
        read_bytes=read,
        amplification=read / samples if samples else 0.0,
        ceilings=ceilings,
        limit=limit,
        seconds=dealing.node_samples / ceilings[limit],
        waiting=max(0.0, 1 - data / ceilings["step"]) if "step" in ceilings else 0.0,
    )
