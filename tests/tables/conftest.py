"""Puts the folders of the loader and storage tests on the path, for the conformance suite and a server."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), *(str(Path(__file__).parents[1] / name) for name in ("loader", "storage"))]
