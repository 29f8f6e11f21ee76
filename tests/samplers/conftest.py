"""Puts the folder of the loader tests on the path, for `interpreter_support`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "loader"))
