"""What data a sampler is over: their number, their fingerprint, an order of their own."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

from penstock.plan.cursor import State
from penstock.plan.epoch import EpochPlan
from penstock.plan.reader import Plan

__all__ = ["data_identity", "data_of", "fingerprint_identity", "fingerprint_of", "own_order"]


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
    """What a state says of the data: their number, and their fingerprint where there is one."""
    return {"samples": len(data), **fingerprint_identity(data)}


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
