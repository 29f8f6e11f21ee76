"""Puts this folder and those of other tests on the path: rank and worker processes import helpers by name."""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / name) for name in ("integration", "distributed", "loader", "docs")]

# The list of tests/conftest.py, and what ranks import: seconds in each of them.
PRELOADED = ["torch.distributed.device_mesh", "penstock.loader.dataloader", "pytest", "accelerate", "lightning.pytorch"]
multiprocessing.set_forkserver_preload(PRELOADED)
