"""Sizes of batches and of their memory, and how many small ones may be in flight.

The planner of resources reads it, without torch.
"""

from __future__ import annotations

__all__ = ["AHEAD", "LIGHT", "LIGHT_FACTOR", "PAGE"]

LIGHT = 1 << 18
"""Maximum bytes of a small batch."""

LIGHT_FACTOR = 16
"""Small, quickly made batches are prefetched this many times deeper, unless the user chose a depth."""

AHEAD = 1 << 25
"""Maximum total bytes of more batches than usual, if the user set no limit."""

PAGE = 1 << 12
"""Slots have memory in multiples of this many bytes."""
