"""Puts this folder and those of the loader and shard tests on the path: workers import their data sets by name."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]

sys.path[:0] = [str(TESTS / name) for name in ("datasets", "loader", "shards")]
