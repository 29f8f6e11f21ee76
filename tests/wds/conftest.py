"""Lets the tests of wds import what they share; forkserver children start with what every test needs."""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
multiprocessing.set_forkserver_preload(
    [
        "torch.distributed.device_mesh",
        "penstock.loader.dataloader",
        "penstock.loader.executors.process.executor",
        "penstock.wds",
        "pytest",
    ]
)
