"""Where a data set stands: a few integers in shared memory, so that running workers see a new epoch.

A data set with an order of its own keeps its place here and nowhere else. The main process writes it between passes;
workers that were started earlier, forked or spawned, read the same memory, which is why ``set_epoch`` takes effect
under ``persistent_workers`` without anything being rebuilt. It is valid at the next ``iter()`` of a loader.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

__all__ = ["Place", "SharedPlace"]


class Place(NamedTuple):
    """Which part of which epoch.

    ``mini_epochs_done`` and ``consumed`` say from where the epoch was dealt out: zero for a whole epoch, otherwise how
    many mini-epochs and samples the job had behind it when it went on with another number of ranks. ``skip`` counts
    this rank's samples of the mini-epoch that were had before a resume. ``samples`` is the number of rows of the epoch.
    """

    epoch: int
    mini_epoch: int
    samples: int
    mini_epochs_done: int = 0
    consumed: int = 0
    skip: int = 0

    @property
    def whole(self) -> Place:
        """The same mini-epoch from its start."""
        return self._replace(skip=0)


class SharedPlace:
    """A `Place` in shared memory. A plain pickle (to a file, to another machine) carries a copy of its values."""

    def __init__(self, place: Place) -> None:
        self._tensor = torch.tensor(place, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        self._view = self._tensor.numpy()

    def get(self) -> Place:
        """Where it stands now."""
        return Place(*self._view.tolist())

    def set(self, place: Place) -> None:
        """Move it, for all processes that share it."""
        self._view[:] = place

    def __getstate__(self) -> dict[str, Any]:
        return {"tensor": self._tensor}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._tensor = state["tensor"]
        if not self._tensor.is_shared():  # a copy, or from a file: workers forked from here must see its changes too
            self._tensor.share_memory_()
        self._view = self._tensor.numpy()
