"""What is a small batch, and how many of them may be in flight. The planner of resources reads it, without torch."""

from __future__ import annotations

__all__ = ["AHEAD", "LIGHT", "LIGHT_FACTOR"]

LIGHT = 1 << 18
"""Maximum bytes of a small batch."""

LIGHT_FACTOR = 8
"""Small, quickly made batches are prefetched this many times deeper, unless the user chose a depth."""

AHEAD = 1 << 25
"""Maximum total bytes of more batches than usual, if the user set no limit."""
