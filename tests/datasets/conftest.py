"""Puts the folder of the loader tests on the path: workers import the data sets of `loader_support` by name."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "loader"))
