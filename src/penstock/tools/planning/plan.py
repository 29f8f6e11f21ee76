"""`make_plan`: compute the whole plan of a run."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.order import make_order
from penstock.tools.planning.cache import hit_rates
from penstock.tools.planning.job import Assumptions, Job
from penstock.tools.planning.partition_report import Check, Dealing, check_dealing, deal
from penstock.tools.planning.rates import Epoch, Needs, epochs_of, needs_of
from penstock.tools.planning.resources import Memory, StartUp, memory_of, start_up_of
from penstock.tools.quality import Quality, TableOrder, measure, sorted_labels
from penstock.wording import counted

__all__ = ["KINDS", "Plan", "make_plan"]

KINDS = ("none", "block", "global")
"""Kinds of shuffle that a plan compares."""

_BATCHES = 48  # batches for the quality of each shuffle


@dataclass(frozen=True)
class Plan:
    """The plan of a run.

    Attributes:
        job, assumptions: the input of the plan.
        dealing, check, memory, start_up, needs: see their classes.
        epochs: each epoch, from the first.
        hit_rates: hit rates of the cache by shuffle and epoch; without "block" if one read has more rows than a block.
        quality: quality by shuffle, measured on the order of the first epoch; empty if a rank has no full batch.
        notes: noteworthy results, as sentences.
    """

    job: Job
    assumptions: Assumptions
    dealing: Dealing
    check: Check
    memory: Memory
    start_up: StartUp
    needs: Needs
    epochs: tuple[Epoch, ...]
    hit_rates: dict[str, tuple[float, ...]]
    quality: dict[str, Quality]
    notes: tuple[str, ...]


def make_plan(job: Job, assumptions: Assumptions | None = None) -> Plan:
    """Return the plan of a run.

    Args:
        job: the run.
        assumptions: about programs and machines; by default measured on a small machine.

    Cost: 0.1 s, and up to 0.7 s for ten thousand ranks, mostly for their checks; O(1) memory.
    """
    assumed = assumptions or Assumptions()
    kinds = [kind for kind in KINDS if kind != "block" or job.read_rows <= job.block_size]
    hits = {kind: hit_rates(job, kind) for kind in kinds}
    mine = hits.get(job.shuffle) or hit_rates(job)
    dealing = deal(job)
    epochs = epochs_of(job, assumed, dealing, mine)
    memory = memory_of(job, assumed)
    needs = needs_of(job, mine)
    check = check_dealing(job)
    return Plan(
        job=job,
        assumptions=assumed,
        dealing=dealing,
        check=check,
        memory=memory,
        start_up=start_up_of(job, assumed, epoch_s=epochs[0].seconds),
        needs=needs,
        epochs=epochs,
        hit_rates=hits,
        quality={} if job.samples // job.ranks < job.batch_size else {kind: _quality(job, kind) for kind in KINDS},
        notes=tuple(_notes(job, dealing, check, epochs, needs)),
    )


def _quality(job: Job, kind: str) -> Quality:
    def make(epoch: int) -> TableOrder:
        order = make_order(kind, job.samples, seed=job.seed, epoch=epoch, block_size=job.block_size, window=job.window)
        return order  # type: ignore[return-value]  # one epoch is measured, so no inverse is needed

    return measure(
        make,
        batch_size=job.batch_size,
        ranks=job.ranks,
        epochs=1,
        labels=sorted_labels(job.samples, job.classes) if job.classes else None,
        batches=max(1, min(_BATCHES, (1 << 16) // job.batch_size)),
        window=job.block_size * job.window,
        windows=1,
    )


def _notes(job: Job, dealing: Dealing, check: Check, epochs: tuple[Epoch, ...], needs: Needs) -> list[str]:
    notes = []
    if not check.ok:
        notes.append("the partition or the order failed its spot check: please report this plan as a bug")
    first, last = epochs[0], epochs[-1]
    if job.step_s is not None and first.waiting > 0:
        notes.append(f"training waits for data in {first.waiting:.0%} of the first epoch: {first.limit} is the limit")
    if job.step_s is not None and first.waiting > 0 and last.waiting == 0:
        notes.append(f"from epoch {_first_without_waiting(epochs)} on, the cache removes this wait")
    if needs.workers is not None and first.limit == "CPU":
        cores = "" if job.cores is None else f", and {needs.cores:,.0f} cores per node"
        notes.append(f"the step needs {counted(needs.workers, 'worker')} for each rank{cores}")
    if first.amplification > 1.5:
        notes.append(
            f"each node reads {first.amplification:,.1f} times the bytes of its samples, because one read has "
            f"{job.read_rows:,} rows: use a block shuffle, a larger cache, or reads of single rows"
        )
    if dealing.batches_fewest < dealing.batches:
        notes.append(
            f"ranks have {dealing.batches_fewest:,} to {dealing.batches:,} batches: use this only for evaluation, "
            "because in training the other ranks would wait forever"
        )
    if dealing.padded * 20 > job.samples:
        more = dealing.padded / job.samples
        said = f"{more:.0%} of the samples repeat" if more <= 1 else f"each sample occurs {more + 1:,.1f} times"
        notes.append(
            f"{said} in an epoch: use fewer {'mini-epochs' if job.mini_epochs > 1 else 'ranks'} for less padding"
        )
    return notes


def _first_without_waiting(epochs: tuple[Epoch, ...]) -> int:
    return next(number for number, epoch in enumerate(epochs) if epoch.waiting == 0) + 1
