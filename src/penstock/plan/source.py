"""`Source`: rows, and nothing else. No rank, no epoch, no order: these are a `Plan`'s."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from penstock.order.permutation import Indices

__all__ = ["Source"]


@runtime_checkable
class Source(Protocol):
    """What every data set of ours reads: a `Manifest`, a `ShardSet`, an `MDSFolder`, `TableFiles`, `TokenFiles`, ...

    Sources are immutable, picklable (as a handle, not with their rows), and safe in threads.
    """

    def __len__(self) -> int: ...

    @property
    def fingerprint(self) -> str:
        """Identity of the rows: content alone, neither paths nor times."""

    def is_prefix_of_current(self, fingerprint: str, rows: int) -> bool:
        """Return whether a source with this fingerprint and so many rows has since grown to be this one."""

    def records(self, rows: Indices) -> list[Any]:
        """Return the records of some rows, int64 of shape (n,), in this order; a row may come twice.

        Negative rows count from the end.

        Raises:
            IndexError: a row outside ``[-len, len)``.
        """
