"""The demo's files, which are an example, can be imported by its tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "demo"))
