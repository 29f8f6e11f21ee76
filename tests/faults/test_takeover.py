"""Iterators of one loader that start, wait and are closed while others do."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from entries_support import closed, opened
from torch.utils.data import Dataset

from penstock import DataLoader
from penstock.errors import WorkerError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

N = 64
HOW: list[dict[str, Any]] = [{"num_workers": 2}, {"num_workers": 2, "executor": "thread"}]


class Numbers(Dataset[int]):
    """Waits at one sample until it is told to go on."""

    def __init__(self, at: int = -1, go: Any = None) -> None:
        self.at, self.go = at, go

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> int:
        if index == self.at:
            self.go.wait(20)
        return index


class Closes:
    """A sampler that closes the loader, and then opens files, which get the numbers of its pipes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.loader: Any = None
        self.files: list[Any] = []

    def __len__(self) -> int:
        return N

    def __iter__(self) -> Iterator[int]:
        for index in range(N):
            if index == 40:
                self.loader.close()
                self.files = [(self.folder / str(number)).open("wb") for number in range(16)]
            yield index


@pytest.mark.parametrize("persistent", [False, True])
def test_a_closed_loader_writes_to_no_file(tmp_path: Path, persistent: bool) -> None:
    sampler = Closes(tmp_path)
    loader = DataLoader(Numbers(), 4, sampler=sampler, num_workers=2, persistent_workers=persistent)
    sampler.loader = loader
    with pytest.raises(WorkerError, match="closed"):
        list(loader)
    for file in sampler.files:
        file.close()
    assert len(sampler.files) == 16
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [0] * 16


@pytest.mark.parametrize("how", HOW, ids=str)
def test_an_iterator_that_waits_is_taken_over(how: dict[str, Any]) -> None:
    import multiprocessing

    go = multiprocessing.Event()
    loader = DataLoader(Numbers(8, go), 4, persistent_workers=True, prefetch_factor=1, **how)
    found: list[Any] = []
    waits = threading.Event()

    def read() -> None:
        try:
            for batch in loader:
                found.append(batch.tolist())
                if len(found) == 2:
                    waits.set()
        except RuntimeError as error:
            found.append(str(error))

    older = threading.Thread(target=read)
    older.start()
    assert waits.wait(20)
    newer = iter(loader)
    go.set()
    assert [int(batch[0]) for batch in newer] == list(range(0, N, 4))
    older.join(20)
    assert not older.is_alive()
    assert "taken over" in found[-1]
    loader.close()


@pytest.mark.parametrize("how", [{}, *HOW], ids=str)
def test_threads_may_start_iterators_at_once(how: dict[str, Any]) -> None:
    loader = DataLoader(Numbers(), 8, **how)
    found: list[Any] = []

    def read() -> None:
        for _ in range(4):
            found.append(sum(len(batch) for batch in loader))

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [N] * 12


class Stateful(Numbers):
    """Has a state."""

    def state_dict(self) -> Any:
        return {"at": 0}

    def load_state_dict(self, state: Any) -> None:
        """Nothing."""


def test_a_state_that_cannot_be_sent_is_refused_when_it_is_loaded() -> None:
    loader = DataLoader(Stateful(), 4, num_workers=1)
    state = DataLoader(Numbers(), 4, num_workers=1).state_dict()
    workers = {"0": {"snapshot": {"dataset": {"at": lambda: 0}}, "since": 0}}
    with pytest.raises((AttributeError, pickle.PicklingError), match="pickle"):
        loader.load_state_dict(closed({**opened(state), "workers": {"num_workers": 1, "next": 0, "workers": workers}}))
