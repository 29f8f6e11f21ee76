"""Puts this folder on the path: workers import the data sets of these tests by name."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
