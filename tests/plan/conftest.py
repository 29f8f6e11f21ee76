"""Lets the tests of streams import what they share, and what those of shards share."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "shards")]
