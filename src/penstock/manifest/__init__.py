"""Manifests: immutable, memory-mapped tables of samples. See `Manifest`."""

from penstock.manifest.check import CheckReport, Problem, check
from penstock.manifest.record import Record
from penstock.manifest.table import Manifest

__all__ = ["CheckReport", "Manifest", "Problem", "Record", "check"]
