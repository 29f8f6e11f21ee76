"""The data loader and its executors. Names are imported on first use, since Ray workers need none of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock import lazy

__all__ = ["DataLoader", "DpexDataLoader", "Failure", "Ledger", "OnError", "RayOptions"]

if TYPE_CHECKING:
    from penstock.compat.dpex import DpexDataLoader
    from penstock.ledger import Ledger
    from penstock.loader.dataloader import DataLoader
    from penstock.loader.executors.ray import RayOptions
    from penstock.loader.on_error import Failure, OnError

__getattr__, __dir__ = lazy.names(
    __name__,
    {
        ".compat.dpex": ["DpexDataLoader"],
        ".ledger": ["Ledger"],
        "dataloader": ["DataLoader"],
        "executors.ray": ["RayOptions"],
        "on_error": ["Failure", "OnError"],
    },
)
