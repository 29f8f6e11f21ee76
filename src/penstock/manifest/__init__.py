"""Manifests: immutable, memory-mapped tables of samples. See `Manifest`.

The names are imported when they are first used: a program that reads samples needs nothing of what checks a manifest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock import lazy

__all__ = ["CheckReport", "Manifest", "Problem", "Record", "check"]

if TYPE_CHECKING:
    from penstock.manifest.checking import CheckReport, Problem, check
    from penstock.manifest.record import Record
    from penstock.manifest.table import Manifest

__getattr__, __dir__ = lazy.names(
    __name__,
    {
        "CheckReport": "checking",
        "Manifest": "table",
        "Problem": "checking",
        "Record": "record",
        "check": "checking",
    },
)
