"""Attributes that a wrapping dataset forwards to the dataset inside it: order, position and state."""

from __future__ import annotations

import copy
from typing import Any, Self

__all__ = ["FORWARDED_ATTRIBUTES", "SourceWrapper"]


class SourceWrapper:
    """A dataset that converts the items of another dataset, in the order of that dataset."""

    source: Any
    """The wrapped dataset."""

    def with_source(self, source: Any) -> Self:
        """Return a copy that wraps another dataset."""
        made = copy.copy(self)
        made.source = source
        return made

    def in_order(self) -> Self:
        """Return the same dataset over its source in order, see `SourceDataset.in_order`."""
        return self.with_source(self.source.in_order())


FORWARDED_ATTRIBUTES = frozenset(
    {"epoch", "load_state_dict", "mini_epoch", "next_mini_epoch", "running", "samples", "seed", "set_epoch"}
    | {
        "plan",
        "rank",
        "world_size",
        "place",
        "set_mini_epoch",
        "splits_by_rank",
        "state_dict",
        "batch_size",
        "drop_last",
        "fingerprint",
        "fork_safe",
    }
)
"""Attributes of a dataset with its own order. A wrapper has them only if the wrapped dataset has them."""
