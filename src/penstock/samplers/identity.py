"""Identity of a sampler's dataset: its length, its fingerprint, its own order, and the datasets inside it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import xxhash
from torch.utils.data import ConcatDataset, StackDataset, Subset

from penstock.order import ORDER_VERSION
from penstock.plan.cursor import State
from penstock.plan.share import SharePlan

__all__ = [
    "data_identity",
    "fingerprint_identity",
    "fingerprint_of",
    "holds_a_share",
    "order_identity",
    "own_order",
    "parts_of",
    "shares_in",
]

_TORCHS = (Subset, ConcatDataset, StackDataset)
"""torch's datasets that contain others."""


def fingerprint_of(data: Any) -> str | None:
    """Return the fingerprint of a dataset's records; None if it has none.

    Reads ``fingerprint`` of the dataset, of its ``manifest``, of its ``source`` (the records of an image dataset), and
    of the manifest of that.

    >>> fingerprint_of(range(3)) is None
    True
    """
    for owner in (data, getattr(data, "source", None)):
        for records in (owner, getattr(owner, "manifest", None)):
            fingerprint = getattr(records, "fingerprint", None)
            if isinstance(fingerprint, str):
                return fingerprint
    return None


def data_identity(data: Any, samples: int) -> State:
    """Return the entries of a state about the data: the number of samples, which is given, and the fingerprint.

    For torch's datasets also a hash of the datasets inside: their fingerprints, and how shares are split and ordered.
    """
    identity = {"samples": samples, **fingerprint_identity(data)}
    if isinstance(data, _TORCHS):
        parts = json.dumps([_part_identity(part) for part in parts_of(data)], sort_keys=True)
        identity["parts"] = xxhash.xxh3_64_hexdigest(parts.encode())
    return identity


def order_identity(shuffle: str, block: Mapping[str, int], data: Any, samples: int, seed: int | None = None) -> State:
    """Return the entries of a state about an order and its data: what they have in common for all samplers.

    Args:
        shuffle, block: name of the order, and the sizes of the block shuffle.
        data, samples: see `data_identity`.
        seed: of the order; None if the entries have none.
    """
    identity = {"order_version": ORDER_VERSION, "shuffle": shuffle, **block, **data_identity(data, samples)}
    return identity if seed is None else {**identity, "seed": seed}


def _part_identity(part: Any) -> State:
    """Return the identity of a dataset inside another; for a share, all that determines a rank's rows."""
    plan = own_order(part)
    if plan is not None:
        return {**plan.identity(), "world_size": plan.ranks}
    return {"samples": len(part) if isinstance(part, Sized) else None, **fingerprint_identity(part)}


def fingerprint_identity(data: Any) -> State:
    """Return the entry of a state for `fingerprint_of`; an empty dict without a fingerprint."""
    fingerprint = fingerprint_of(data)
    return {} if fingerprint is None else {"fingerprint": fingerprint}


def own_order(data: Any) -> SharePlan | None:
    """Return the plan of a dataset with its own order, such as a `RankDataset`; None for others."""
    plan = getattr(data, "plan", None)
    return plan if isinstance(plan, SharePlan) else None


def parts_of(data: Any) -> Iterator[Any]:
    """Yield the datasets inside torch's `Subset`, `ConcatDataset` and `StackDataset`; for others, the object itself.

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
    """Yield the datasets inside a dataset that split themselves by rank."""
    return (part for part in parts_of(data) if getattr(part, "splits_by_rank", False))


def holds_a_share(data: Any) -> bool:
    """Return whether a dataset, or one inside it, splits itself by rank."""
    return any(True for _ in shares_in(data))
