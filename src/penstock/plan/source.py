"""`Source`: the stored rows behind a dataset. It has no rank, epoch or order; these belong to a `Plan`."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from penstock.order.permutation import Indices

__all__ = ["Source"]


@runtime_checkable
class Source(Protocol):
    """The rows that a Penstock dataset reads: a `Manifest`, `ShardSet`, `MDSFolder`, `TableFiles`, `TokenFiles`, ...

    Sources are immutable, thread-safe, and picklable (as a handle, without their rows).
    """

    def __len__(self) -> int: ...

    @property
    def fingerprint(self) -> str:
        """Identity of the rows: a hash of their content, without paths and times."""

    def is_prefix_of_current(self, fingerprint: str, rows: int) -> bool:
        """Return whether this source had this fingerprint and number of rows before rows were appended."""

    def records(self, rows: Indices) -> list[Any]:
        """Return the records of some rows, int64 of shape (n,), in the same order; rows may repeat.

        Negative rows count from the end.

        Raises:
            IndexError: a row is outside ``[-len, len)``.
        """
