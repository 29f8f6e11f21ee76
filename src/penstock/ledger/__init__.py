"""Which rows were in which step of a job: computed from the order, without a log."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock import lazy

__all__ = ["Ledger"]

if TYPE_CHECKING:
    from penstock.ledger.ledger import Ledger

__getattr__, __dir__ = lazy.names(__name__, {"ledger": ["Ledger"]})
