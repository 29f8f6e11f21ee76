"""What a data set around another one passes on: the order of the inner one, and its place in it."""

from __future__ import annotations

__all__ = ["OF_THE_SOURCE"]

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
