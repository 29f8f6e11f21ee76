"""The numbers of epochs that data sets take, and streams that are left open at the end of the program."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from busy_support import HANG
from full_run import full_only
from interpreter_support import run
from loader_support import worker_scope

import penstock as ps
from penstock import wds
from penstock.errors import ConfigError
from penstock.loader.workerinfo import thread_worker
from penstock.plan.shared import SharedEpoch
from penstock.shards import StreamShards


def data_sets() -> dict[str, Any]:
    shards = StreamShards("a.tar", rank=0, world_size=1)
    return {
        "mixture": ps.Mixture([(range(3), 1)], rank=0, world_size=1),
        "shards": shards,
        "streams": ps.Mixture([(shards, 1)]),
        "wds": wds.WebDataset("a.tar", shardshuffle=False),
    }


@pytest.mark.parametrize("kind", ["mixture", "shards", "streams", "wds"])
def test_epochs_that_are_none_are_refused(kind: str) -> None:
    dataset = data_sets()[kind]
    for epoch, words in ((1.5, "integer"), ("2", "integer"), (None, "integer"), (-1, "0 or more"), (2**62, "below")):
        with pytest.raises(ConfigError, match=f"epoch must be .*{words}"):
            dataset.set_epoch(epoch)
    dataset.set_epoch(np.int64(3))


@full_only("an interpreter for each", but=["wds.WebDataset(sys.argv[1], shardshuffle=False)"])
@pytest.mark.parametrize(
    "code", ["StreamShards(sys.argv[1], rank=0, world_size=1)", "wds.WebDataset(sys.argv[1], shardshuffle=False)"]
)
def test_a_stream_may_be_open_at_the_end_of_the_program(code: str, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as shard:
        for name in ("1.txt", "2.txt"):
            shard.addfile(tarfile.TarInfo(name), io.BytesIO())
    program = "import sys\nimport penstock as ps\nfrom penstock import wds\nfrom penstock.shards import StreamShards\n"
    program += f"dataset = {code}\niterator = iter(dataset)\nprint(next(iterator)['__key__'])\n"
    done = run(["-c", program, str(tmp_path / "a.tar")], timeout=HANG)
    assert (done.stdout, done.stderr) == ("1\n", "")


def test_each_worker_of_each_number_of_workers_has_an_epoch_of_its_own() -> None:
    epochs = SharedEpoch()
    workers = [thread_worker(number, count, 0, None) for count in (1, 2, 3, 4, 64, 65) for number in range(count)]
    for worker in workers:
        with worker_scope(worker):
            assert epochs.next == 0
            epochs.begin(0)
            assert (epochs.current, epochs.next) == (0, 1)
