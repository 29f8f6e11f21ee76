"""Puts this folder and those of other tests on the path: rank and worker processes import helpers by name."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / name) for name in ("integration", "distributed", "loader")]
