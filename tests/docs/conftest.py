"""Puts this folder, that of the loader tests and that of the site's tools on the path."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = map(str, (TESTS / "docs", TESTS / "loader", TESTS.parent / "docs" / "tools"))
