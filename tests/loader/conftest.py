"""Puts folders on the path: worker processes import the data sets of `loader_support` by name, and tests of all kinds
of data sets what those of shards and of the server share.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path += [str(Path(__file__).parents[1] / folder) for folder in ("shards", "server")]
