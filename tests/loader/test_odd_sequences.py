"""Sequences of calls that are unusual, and happen: what they leave behind."""

from __future__ import annotations

import copy
import itertools
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from loader_support import Squares, batches, plain
from torch.utils.data import Dataset

from penstock import DataLoader

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Large(Squares):
    """64 KiB a sample, so that batches come in the ring."""

    def __getitem__(self, index: int) -> Any:
        return torch.full((1 << 14,), index, dtype=torch.float32)


class Killer(Squares):
    """Its worker is killed at one sample, the first time."""

    def __init__(self, n: int, at: int, flag: Path) -> None:
        super().__init__(n)
        self.at, self.flag = at, flag

    def __getitem__(self, index: int) -> int:
        if index == self.at and not self.flag.exists():
            self.flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_breaks_leave_no_slot_behind() -> None:
    with DataLoader(Large(64), 4, num_workers=2, persistent_workers=True, prefetch_factor=3) as loader:
        for _ in range(20):
            for _ in itertools.islice(loader, 3):
                pass
        loader.reset_stats()
        assert [int(batch[0, 0]) for batch in loader] == list(range(0, 64, 4))
        assert loader.stats()["ways"] == {"ring": 16}
        executor: Any = loader._workers.executor
        assert not executor._lent


def test_passes_after_a_break_are_whole_out_of_order_too() -> None:
    options: dict[str, Any] = {"num_workers": 1, "in_order": False, "persistent_workers": True, "executor": "process"}
    with DataLoader(Squares(40), 8, **options) as loader:
        next(iter(loader))
        assert [len(batches(loader)) for _ in range(3)] == [5, 5, 5]


def test_an_error_that_is_no_batchs_moves_nothing(tmp_path: Path) -> None:
    def make() -> DataLoader[Any]:
        return DataLoader(Killer(24, 10, tmp_path / "killed"), 2, seed=1, num_workers=2, executor="process")

    loader = make()
    had: list[Any] = []
    with pytest.raises(RuntimeError, match="killed by signal"):
        had.extend(plain(batch) for batch in loader)
    for _ in range(3):  # each state is that of the run before it
        state = loader.state_dict()
        assert "ahead" not in state
        loader = make()
        loader.load_state_dict(state)
        had += [plain(batch) for batch in itertools.islice(loader, 2)]
    assert had == batches(DataLoader(Squares(24), 2, seed=1))[: len(had)]


class Unpicklable(Squares):
    stubborn = True

    def __getstate__(self) -> Any:
        if Unpicklable.stubborn:
            raise TypeError("cannot travel")
        return self.__dict__


def test_a_start_that_fails_costs_no_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = DataLoader(Unpicklable(8), 2, seed=1, num_workers=1, multiprocessing_context="forkserver")
    with pytest.raises(TypeError, match="cannot travel"):
        iter(loader)
    assert loader.epoch == 0
    loader.num_workers = 0
    loader.multiprocessing_context = None
    assert len(batches(loader)) == 4
    assert loader.epoch == 1


def marked(worker: int) -> None:
    torch.manual_seed(1000 + worker)


class Seeds(Squares):
    def __getitem__(self, index: int) -> int:
        return torch.initial_seed() % 1_000_003


def test_attributes_may_be_assigned() -> None:
    loader = DataLoader(Seeds(4), 2, num_workers=1, persistent_workers=True)
    first = batches(loader)
    loader.worker_init_fn = marked
    assert batches(loader) == [[1000, 1000], [1000, 1000]] != first
    loader.num_workers = 0
    loader.worker_init_fn = None
    assert batches(loader)[0][0] == torch.initial_seed() % 1_000_003
    loader.close()


def test_a_copy_has_a_place_of_its_own() -> None:
    loader = DataLoader(Squares(12), 2, seed=1)
    clone = copy.copy(loader)
    next(iter(clone))
    assert clone.state_dict() != loader.state_dict()
    assert len(batches(loader)) == 6


def test_iterators_have_a_length() -> None:
    loader = DataLoader(Squares(11), 2, num_workers=1)
    assert len(iter(loader)) == len(loader) == 6  # type: ignore[arg-type]


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_threads_that_share_an_iterator_take_turns(executor: str) -> None:
    iterator: Iterator[Any] = iter(DataLoader(Squares(200), 2, num_workers=2, executor=executor))
    had: list[Any] = []
    threads = [threading.Thread(target=lambda: had.extend(plain(batch) for batch in iterator)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(had) == [[i * i, (i + 1) ** 2] for i in range(0, 200, 2)]


class Permuted(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return torch.full((5, 6, 3), index).permute(2, 0, 1)


@pytest.mark.parametrize("workers", [0, 2])
def test_strides_of_a_batch_are_torchs(workers: int) -> None:
    (batch,) = DataLoader(Permuted(), 4, num_workers=workers)
    assert batch.is_contiguous()
