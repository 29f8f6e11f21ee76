"""`pack` and its report, which `penstock.tools.pack` defines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock import lazy

if TYPE_CHECKING:
    from penstock.tools.pack import PackReport, pack

__all__ = ["PackReport", "pack"]

__getattr__, __dir__ = lazy.names(__name__, {"..tools.pack": ["PackReport", "pack"]})
