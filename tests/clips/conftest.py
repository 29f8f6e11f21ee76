"""Puts this folder and that of the loader tests on the path: workers import their data sets by name."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "loader")]
