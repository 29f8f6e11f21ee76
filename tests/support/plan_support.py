"""Plans, read the way that loaders read them."""

from __future__ import annotations

from typing import Any

from penstock.plan.reader import PlanReader


def bound(sampler: Any) -> Any:
    """Return the next epoch of a sampler, bound and begun, as a reader of its own begins it."""
    return PlanReader(sampler).start(advance=False)
