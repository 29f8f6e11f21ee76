"""What a data set around another one passes on: the order of the inner one, and its place in it."""

from __future__ import annotations

import copy
from typing import Any, Self

__all__ = ["OF_THE_SOURCE", "Around"]


class Around:
    """A data set that makes items of those of another one, in that one's order."""

    source: Any
    """The data set inside."""

    def around(self, source: Any) -> Self:
        """Return the same around another data set."""
        made = copy.copy(self)
        made.source = source
        return made


OF_THE_SOURCE = frozenset(
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
"""Attributes of a data set with an order of its own. Where the inner one has none of them, neither has the outer one.
"""
