"""Lets the tests of sources import what those of shards and of the server share."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("shards", "server")]
