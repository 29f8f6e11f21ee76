"""Small things that programs import."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from full_run import full_only
from torch.utils.data import DataLoader, IterableDataset

from penstock.wds import utils


@full_only("spawns processes")
def test_seeds_are_the_same_in_every_process_and_differ() -> None:
    program = "from penstock.wds.utils import make_seed; print(make_seed('a', 1, None))"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(found.stdout) == utils.make_seed("a", 1, None)
    seeds = {utils.make_seed("a", number) for number in range(1000)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 1 << 31 for seed in seeds)


class _Seeds(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield str((*utils.pytorch_worker_info(), utils.pytorch_worker_seed()))


def test_workers_and_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(_Seeds()) == ["(0, 1, 0, 1, 0)"]
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    found = sorted(DataLoader(_Seeds(), batch_size=None, num_workers=2))
    assert found == ["(2, 3, 0, 2, 2000)", "(2, 3, 1, 2, 2001)"]


def test_so_many_samples() -> None:
    batches = [torch.arange(4), torch.arange(2)]
    assert [utils.guess_batchsize(batch) for batch in (batches[0], (batches[1], 5), [batches[0]])] == [4, 2, 4]
    assert [len(batch) for batch in utils.repeatedly(batches, nsamples=9)] == [4, 2, 4]
    assert [len(batch) for batch in utils.repeatedly(batches, nsamples=3, batchsize=lambda _: 1)] == [4, 2, 4]
    assert list(utils.repeatedly([], nsamples=3)) == []


def test_stages_of_ones_own() -> None:
    class Older(utils.PipelineStage):
        def invoke(self, *args: Any, **kw: Any) -> Any:
            return (2 * item for item in args[0])

    assert list(Older().run(iter([1, 2]))) == [2, 4]
    with pytest.raises(NotImplementedError, match=r"PipelineStage needs run\(src\)"):
        utils.PipelineStage().run(iter([1]))
