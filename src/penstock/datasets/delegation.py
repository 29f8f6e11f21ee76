"""`SourceWrapper`: a dataset that converts the items of another dataset, in the order of that dataset."""

from __future__ import annotations

import copy
from typing import Any, Self

from penstock.manifest.classes import HasClasses, unknown_classes

__all__ = ["SourceWrapper"]

_FORWARDED = frozenset(
    {"epoch", "load_state_dict", "mini_epoch", "next_mini_epoch", "running", "samples", "seed", "set_epoch", "plan"}
    | {"rank", "world_size", "place", "set_mini_epoch", "splits_by_rank", "state_dict", "batch_size", "drop_last"}
    | {"fingerprint", "fork_safe"}
)
"""Attributes of a dataset with its own order. A wrapper has them only if the wrapped dataset has them."""


class SourceWrapper:
    """A dataset that converts the items of another dataset. Order, position and state are those of that dataset."""

    source: Any
    """The wrapped dataset."""

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {self.source!r}"

    def __len__(self) -> int:
        return len(self.source)

    def __copy__(self) -> Self:
        made = object.__new__(type(self))
        # A copy has its own position, see `SourceDataset`.
        made.__dict__.update(self.__dict__, source=copy.copy(self.source))
        return made

    def with_source(self, source: Any) -> Self:
        """Return a copy that wraps another dataset."""
        made = copy.copy(self)
        made.source = source
        return made

    def in_order(self) -> Self:
        """Return the same dataset over its source in order, see `SourceDataset.in_order`."""
        return self.with_source(self.source.in_order())

    def __getattr__(self, name: str) -> Any:
        if name in _FORWARDED:
            return getattr(self.source, name)
        if name in ("classes", "class_to_idx") and isinstance(self, HasClasses):
            # Python calls __getattr__ when the property itself raised an AttributeError.
            raise unknown_classes(self)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
