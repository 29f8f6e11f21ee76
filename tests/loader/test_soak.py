"""Many loaders over many epochs, left and broken at random: at the end there is what there was at the beginning."""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
from busy_support import HANG
from interpreter_support import FULL
from leak_support import left
from soak_support import Vectors

import penstock
from penstock import DataLoader

LOADERS, EPOCHS = 20, 50

PROGRAM = """
import multiprocessing, sys
sys.path[:0] = {path!r}
multiprocessing.set_forkserver_preload(["torch.distributed.device_mesh", "penstock.loader.dataloader", "soak_support"])
from soak_support import soak
soak({loaders}, {epochs})
"""


@pytest.mark.skipif(not FULL, reason="a long run; PENSTOCK_TEST_FULL=1")
def test_nothing_is_left_after_many_loaders() -> None:
    """In a process of its own: what other tests leave to the allocator comes and goes in larger pieces. And with one
    arena: `malloc_trim` leaves the ends of those that belong to threads, which are some 20 MB more or less.
    """
    path = [str(Path(__file__).parent), str(Path(penstock.__file__).parents[1])]
    program = PROGRAM.format(path=path, loaders=LOADERS, epochs=EPOCHS)
    command = [sys.executable, "-W", "ignore", "-c", program]
    env = {**os.environ, "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG, env=env, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""


@pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:.*are being kept")
def test_the_last_workers_leave_no_descriptor() -> None:
    multiprocessing.active_children()
    before = left()[1]
    assert len(list(DataLoader(Vectors(bad=False), 8, num_workers=2))) == 10
    gc.collect()
    assert left()[1] <= before
