"""Fingerprints of several sources, of views, and of earlier, shorter versions of a manifest."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from penstock.manifest.formats.base import Part

__all__ = ["combine", "prefix_fingerprints", "view_fingerprint"]


def combine(fingerprints: list[str]) -> str:
    """Return the fingerprint of concatenated sources; a single source keeps its own."""
    return fingerprints[0] if len(fingerprints) == 1 else xxhash.xxh3_128_hexdigest(" ".join(fingerprints).encode())


def view_fingerprint(whole: str, view: range) -> str:
    """Return the fingerprint of a view of a manifest."""
    return xxhash.xxh3_128_hexdigest(f"{whole}[{view.start}:{view.stop}:{view.step}]".encode())


def prefix_fingerprints(parts: Sequence[Part], rows: int) -> list[str]:
    """Return all fingerprints that the manifest may have had when it held ``rows`` rows, likeliest first."""
    start = 0
    before: list[str] = []
    results: list[str] = []
    for part in parts:
        if start <= rows <= start + part.rows:
            results += [combine([*before, last]) for last in part.fingerprints_at(rows - start)]
        start += part.rows
        before.append(part.fingerprint)
    return results
