"""What data a sampler is over: their number, their fingerprint, an order of their own, the data sets inside them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import xxhash
from torch.utils.data import ConcatDataset, StackDataset, Subset

from penstock.plan.cursor import State
from penstock.plan.epoch import EpochPlan
from penstock.plan.reader import Plan
from penstock.plan.share import SharePlan

__all__ = [
    "data_identity",
    "data_of",
    "fingerprint_identity",
    "fingerprint_of",
    "holds_a_share",
    "own_order",
    "parts_of",
    "shares_in",
]

_TORCHS = (Subset, ConcatDataset, StackDataset)
"""Data sets of torch that hold others."""


def fingerprint_of(data: Any) -> str | None:
    """The fingerprint of the records behind a data set, or None where it knows of none.

    Its own, that of its ``manifest``, or those of its ``source`` (a data set of images has its records there).

    >>> fingerprint_of(range(3)) is None
    True
    """
    for owner in (data, getattr(data, "source", None)):
        for records in (owner, getattr(owner, "manifest", None)):
            fingerprint = getattr(records, "fingerprint", None)
            if isinstance(fingerprint, str):
                return fingerprint
    return None


def data_identity(data: Sized) -> State:
    """Return the entries of a state about the data: their number, their fingerprint, and a hash of what is inside of
    torch's data sets: the fingerprints there, and how shares are dealt and ordered.
    """
    identity = {"samples": len(data), **fingerprint_identity(data)}
    if isinstance(data, _TORCHS):
        parts = json.dumps([_part_identity(part) for part in parts_of(data)], sort_keys=True)
        identity["parts"] = xxhash.xxh3_64_hexdigest(parts.encode())
    return identity


def _part_identity(part: Any) -> State:
    """Return what makes a part other rows on every rank."""
    plan = own_order(part)
    if isinstance(plan, SharePlan):
        return {**plan.identity(), "world_size": plan.peek_world().world_size}
    return {"samples": len(part) if isinstance(part, Sized) else None, **fingerprint_identity(part)}


def fingerprint_identity(data: Any) -> State:
    """The entry of a state for `fingerprint_of`; nothing where there is none."""
    fingerprint = fingerprint_of(data)
    return {} if fingerprint is None else {"fingerprint": fingerprint}


def data_of(sampler: Any) -> Any:
    """The data set that a sampler is over, or None: torch's and ours keep it under one of two names."""
    return getattr(sampler, "dataset", getattr(sampler, "data_source", None))


def own_order(data: Any) -> Plan[EpochPlan] | None:
    """Return the plan of a data set that has an order of its own, such as a `RankDataset`; None for others."""
    plan = getattr(data, "plan", None)
    return plan if isinstance(plan, Plan) else None


def parts_of(data: Any) -> Iterator[Any]:
    """Yield the data sets inside torch's `Subset`, `ConcatDataset` and `StackDataset`; anything else is its only part.

    >>> list(parts_of(ConcatDataset([Subset([1, 2], [0]), [3]])))
    [[1, 2], [3]]
    """
    if isinstance(data, Subset):
        yield from parts_of(data.dataset)
    elif isinstance(data, ConcatDataset | StackDataset):
        inner: Any = data.datasets
        for one in inner.values() if isinstance(inner, Mapping) else inner:
            yield from parts_of(one)
    else:
        yield data


def shares_in(data: Any) -> Iterator[Any]:
    """Yield the parts of a data set that give each rank a share of its own."""
    return (part for part in parts_of(data) if getattr(part, "splits_by_rank", False))


def holds_a_share(data: Any) -> bool:
    """Return whether a data set, or a part of it, gives each rank a share of its own."""
    return any(True for _ in shares_in(data))
