"""Manifests: immutable, memory-mapped tables of samples. See `Manifest`.

Names are imported at first use: a program that only reads samples does not load the checks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock import lazy

__all__ = ["CheckReport", "Manifest", "Problem", "Record", "check"]

if TYPE_CHECKING:
    from penstock.manifest.checking import CheckReport, Problem, check
    from penstock.manifest.table import Manifest, Record

__getattr__, __dir__ = lazy.names(
    __name__,
    {"checking": ["CheckReport", "Problem", "check"], "table": ["Manifest", "Record"]},
)
