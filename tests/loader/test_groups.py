"""Small, quick batches are handed over several at a time: nothing else may differ from batches handed over singly."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from entries_support import opened
from full_run import full_only
from torch.utils.data import Dataset, IterableDataset, default_collate, get_worker_info

from penstock import DataLoader
from penstock.errors import WorkerError

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

MANY = 4000


class Small(Dataset[Any]):
    """Batches that are little work; at some index something happens, late enough for groups to have begun."""

    pure = True

    def __init__(self, happens: str = "", at: int = 3000, folder: Path | None = None) -> None:
        self.happens, self.at, self.folder = happens, at, folder

    def __len__(self) -> int:
        return MANY

    def __getitem__(self, index: int) -> Any:
        if index == self.at:
            if self.happens == "raise":
                raise LookupError("bad luck")
            if self.happens == "hang":
                time.sleep(60)
            if self.happens == "die" and not (self.folder and (self.folder / "died").exists()):
                if self.folder:
                    (self.folder / "died").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            if self.happens == "shape":
                return torch.full((9,), index), index
        return torch.full((8,), index), index


class Grows(Small):
    """Rows of another length from some sample on: they fit no slot, and travel beside."""

    def __getitem__(self, index: int) -> Any:
        return torch.full((50_000 if index >= self.at else 1000,), index), index


class Swells(Small):
    """Rows that need no slot, until they are too large for a pipe."""

    def __getitem__(self, index: int) -> Any:
        return torch.full((50_000 if index >= self.at else 8,), index), index


class Files(Small):
    """Samples of 2.5 MB that need no slot: four of their batches are more than may be begun ahead."""

    def __getitem__(self, index: int) -> Any:
        return bytes(2_500_000), index


class Odd:
    """An index that does not pickle."""

    def __init__(self) -> None:
        self.lock = (i for i in ())


class Batches:
    """A batch sampler with an index in it that does not pickle."""

    def __iter__(self) -> Any:
        for begin in range(0, MANY, 4):
            yield [Odd()] if begin == 2000 else list(range(begin, begin + 4))

    def __len__(self) -> int:
        return MANY // 4


class Counted(IterableDataset[Any]):
    def __iter__(self) -> Any:
        info = get_worker_info()
        assert info is not None
        yield from range(info.id, 120, info.num_workers)


def had(loader: Any) -> list[Any]:
    """Batches as lists, and errors in their places."""
    found: list[Any] = []
    iterator = iter(loader)
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            return found
        except (LookupError, TypeError, RuntimeError) as error:
            found.append(type(error))
        else:
            found.append([part.tolist() if part.numel() < 10_000 else part.sum().item() for part in batch])


def stack(samples: Any) -> Any:
    """A collate function of a user's, whose batches are not divided."""
    return default_collate(samples)


@pytest.mark.clock
@pytest.mark.parametrize("how", [{"num_workers": 2}, {"num_workers": 1}, {"num_workers": 2, "collate_fn": stack}])
def test_groups_there_are(how: dict[str, Any]) -> None:
    """Else the other tests here show nothing. Batches that need no slot, and those made in one place, go together."""
    loader = DataLoader(Small(), 4, **how)
    iterator: Any = iter(loader)
    while not (iterator._batches._flow.ahead()[1] > 1 and iterator._batches.depth > 8):
        next(iterator, None)  # on a busy machine it may take more of them
        assert opened(loader.state_dict())["sampler"]["consumed"] < MANY // 2, "none that other tests would see"


class Counting(Small):
    """Counts the samples that were begun, in all workers."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = multiprocessing.Value("i", 0)

    def __getitem__(self, index: int) -> Any:
        with self.begun.get_lock():
            self.begun.value += 1
        return super().__getitem__(index)


@pytest.mark.parametrize(("chosen", "most"), [(2, 2), (3, 3), (None, 32)])
@pytest.mark.parametrize("pure", [False, True])
def test_no_more_batches_are_begun_than_prefetch_factor_allows(chosen: int | None, most: int, pure: bool) -> None:
    """A number that the user chose is kept. Only torch's default is raised for tiny, quick batches."""
    data = Counting()
    data.pure = pure  # type: ignore[attr-defined]
    with DataLoader(data, 4, num_workers=2, prefetch_factor=chosen) as loader:
        for had, _ in zip(range(1, 200), loader, strict=False):
            assert data.begun.value <= 4 * (had + 2 * most)


class Undeclared(Small):
    """Says which worker made it."""

    pure = False

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        return torch.full((8,), index), info.id


@full_only("workers for each", but=["{}"])
@pytest.mark.clock
@pytest.mark.parametrize("how", [{}, {"seed": 3, "persistent_workers": True}, {"drop_last": True}], ids=str)
def test_workers_that_take_turns_are_given_their_own_batches_in_groups(how: dict[str, Any]) -> None:
    loader = DataLoader(Undeclared(), 7, num_workers=3, **how)
    for _ in range(2):
        iterator: Any = iter(loader)
        workers, depth = [], 0
        for _, makers in iterator:
            depth = max(depth, iterator._batches.depth)
            assert len(set(makers.tolist())) == 1
            workers.append(makers[0].item())
        assert workers == [number % 3 for number in range(len(loader))]
        assert depth == 16 * 6, "else the test shows nothing"
    loader.close()


def test_persistent_workers_that_draw_without_a_seed_are_as_far_ahead_as_torchs() -> None:
    """What they draw in the next pass shows it."""
    with DataLoader(Undeclared(), 4, num_workers=2, persistent_workers=True) as loader:
        for _ in range(2):
            iterator: Any = iter(loader)
            assert max(iterator._batches.depth for _ in iterator) == 4


@full_only("workers for each", but=["{}"])
@pytest.mark.parametrize("how", [{}, {"collate_fn": list}], ids=str)
def test_large_batches_without_a_slot_are_not_begun_by_the_dozen(how: dict[str, Any]) -> None:
    iterator: Any = iter(DataLoader(Files(), 4, num_workers=2, **how))
    depths = {iterator._batches.depth for _, _ in zip(range(20), iterator, strict=False)}
    assert max(depths) == 4


@pytest.mark.clock
def test_the_first_batch_of_a_later_pass_waits_for_few_others() -> None:
    loader = DataLoader(Small(), 4, num_workers=2)
    for _ in range(2):
        iterator: Any = iter(loader)
        assert iterator._batches.depth == 4
        next(iterator)
        while iterator._batches.depth <= 8:
            next(iterator)


class Places(Dataset[bool]):
    """Says whether the main thread makes a sample; little work at first, later more."""

    def __len__(self) -> int:
        return 8100

    def __getitem__(self, index: int) -> bool:
        if index >= 8000:
            time.sleep(0.003)
        return threading.current_thread() is threading.main_thread()


class Meets(Dataset[int]):
    """Each sample waits until the other of its batch is being made."""

    def __init__(self) -> None:
        self.both: threading.Barrier | None = None

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        with _making:
            self.both = self.both or threading.Barrier(2)
        self.both.wait(30)
        return index


_making = threading.Lock()


def test_the_threads_of_a_worker_share_a_batch() -> None:
    loader = DataLoader(Meets(), 2, num_workers=1, threads_per_worker=2, executor="process")
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]


@pytest.mark.clock
def test_batches_that_are_little_work_are_made_by_one_thread_of_a_worker() -> None:
    loader = DataLoader(Places(), 2, num_workers=1, threads_per_worker=2, executor="process")
    by_main = [bool(batch.any()) for batch in loader]
    assert not any(by_main[:64])
    # On a busy machine some of the 4,000 take longer. After each of these, threads make the next 64.
    assert sum(by_main) > 2000
    assert not any(by_main[-30:])


@pytest.mark.parametrize("happens", ["", "raise", "shape"])
def test_the_same_batches_as_inline(happens: str) -> None:
    data = Small(happens)
    assert had(DataLoader(data, 4, num_workers=2)) == had(DataLoader(data, 4))


@full_only("workers for each", but=["Swells-2"])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", [Grows, Swells])
def test_batches_that_outgrow_their_slots(kind: type[Small], workers: int) -> None:
    data = kind(at=3500)
    assert had(DataLoader(data, 4, num_workers=workers)) == had(DataLoader(data, 4))


def test_an_index_that_does_not_pickle_is_an_error_in_its_place() -> None:
    found = had(DataLoader(Small(), batch_sampler=Batches(), num_workers=2))
    assert found[500] is TypeError
    assert [batch for batch in found if batch is not TypeError] == [
        batch for k, batch in enumerate(had(DataLoader(Small(), 4))) if k != 500
    ]


WORKERS = [{"num_workers": 2}, {"num_workers": 1, "threads_per_worker": 2, "executor": "process"}]
"""By the time that something happens, the main thread of a worker with threads makes the batches."""


@full_only("waits for real time-outs", but=["threads"])
@pytest.mark.parametrize("how", WORKERS, ids=["processes", "threads"])
def test_a_sample_that_hangs_is_named(how: dict[str, Any]) -> None:
    with pytest.raises(RuntimeError, match=r"timed out.*at sample 3000"):
        for _ in DataLoader(Small("hang"), 4, timeout=3, **how):
            pass


@pytest.mark.parametrize("how", WORKERS, ids=["processes", "threads"])
def test_a_death_is_named(how: dict[str, Any]) -> None:
    with pytest.raises(WorkerError, match="at sample 3000"):
        for _ in DataLoader(Small("die"), 4, **how):
            pass


def test_a_death_is_made_good(tmp_path: Path) -> None:
    loader = DataLoader(Small("die", folder=tmp_path), 4, num_workers=2, on_worker_death="restart")
    assert had(loader) == had(DataLoader(Small(), 4))
    assert loader.stats()["restarts"] == 1


def test_out_of_order_all_come_once() -> None:
    found = had(DataLoader(Small(), 4, num_workers=2, in_order=False))
    assert sorted(index for _, indices in found for index in indices) == list(range(MANY))


def test_a_stream_left_near_its_end_does_not_shorten_the_next_pass() -> None:
    """What was still asked for meets the end of the old iterators, not of the new ones."""
    loader = DataLoader(Counted(), 2, num_workers=2, persistent_workers=True)
    for _ in range(3):
        iterator = iter(loader)
        for _ in range(57):
            next(iterator)
        assert len(list(loader)) == 60


def test_out_of_order_with_fewer_bytes_than_workers_have_batches() -> None:
    loader = DataLoader(Small(), 4, num_workers=2, in_order=False, max_bytes_in_flight=1, timeout=60)
    iterator = iter(loader)
    assert len(next(iterator)[0]) == 4, "one batch is always in flight"
