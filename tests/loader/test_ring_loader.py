"""The ring under a loader: batches that are kept, and batches that grow."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from process_support import Frames
from torch.utils.data import Dataset

from penstock import DataLoader
from penstock.loader.collate import place
from penstock.loader.executors.process.ring import BOARD, SLOTS

pytestmark = pytest.mark.filterwarnings("error", "ignore:This DataLoader will create")


def loader_of(frames: Frames, **options: Any) -> DataLoader[Any]:
    return DataLoader(frames, 2, num_workers=2, executor="process", **options)


def test_batches_that_are_kept_stay_where_they_are() -> None:
    loader = loader_of(Frames([5000] * 40))
    for number, batch in enumerate(list(loader)):
        assert (batch[0] == 2 * number).all()
        assert (batch[1] == 2 * number + 1).all()
    assert loader.stats()["ways"] == {"ring": 20}


def test_a_program_that_keeps_more_batches_than_there_are_slots() -> None:
    data = Frames([5000] * (SLOTS + 100))
    data.pure = True  # type: ignore[attr-defined]
    with DataLoader(data, 1, num_workers=1, executor="process") as loader:
        for number, batch in enumerate(list(loader)):
            assert (batch == number % 251).all()
        assert loader.stats()["ways"] == {"ring": SLOTS - 1, "pipe": 101}
        del batch
        loader.reset_stats()
        assert sum(len(batch) for batch in loader) == SLOTS + 100
        assert loader.stats()["ways"] == {"ring": SLOTS + 100}


@pytest.mark.parametrize("persistent", [False, True])
def test_batches_that_grow_and_shrink(persistent: bool) -> None:
    sizes = [size for size in (300, 5000, 20_000, 100, 90_000, 5000, 400_000, 10, 1_000_000, 3) for _ in range(4)]
    loader = loader_of(Frames(sizes), persistent_workers=persistent)
    for _ in range(2):
        before = None
        for number, batch in enumerate(loader):
            assert batch.shape == (2, sizes[2 * number])
            assert (batch[1] == 2 * number + 1).all()
            if before is not None:
                assert (before == 2 * number - 2).all()
            before = batch[0]
    loader.close()


def test_every_slot_holds_what_is_held() -> None:
    """Keep rows of batches for a random while, in threads, in cycles; none changes."""
    random = np.random.default_rng(3)
    loader = loader_of(Frames([6000] * 300))
    held: list[tuple[int, Any]] = []
    for number, batch in enumerate(loader):
        row = batch[1].numpy()[5:] if number % 2 else batch[1][::3]
        held.append((2 * number + 1, row))
        circle: list[Any] = [batch]
        circle.append(circle)
        for _ in range(int(random.integers(0, 3))):
            if held:
                held.pop(int(random.integers(0, len(held))))
        assert all((kept == value % 251).all() for value, kept in held)


class Shrinking(Dataset[Any]):
    """Four large samples, and then numbers."""

    def __len__(self) -> int:
        return 120

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(300_000) if index < 4 else index


class Texts(Dataset[str]):
    def __getitem__(self, index: int) -> str:
        return f"{index} \N{SNOWMAN} " * 1500

    def __len__(self) -> int:
        return 2 * (SLOTS + 100)


def test_long_texts_come_by_the_ring_and_hold_no_slot() -> None:
    with DataLoader(Texts(), 2, num_workers=2, executor="process") as loader:
        held = [text for batch in loader for text in batch]
        assert held == list(map(Texts().__getitem__, range(len(held))))
        assert loader.stats()["ways"] == {"ring": SLOTS + 100}


def test_batches_that_need_no_slot_give_theirs_back() -> None:
    loader = DataLoader(Shrinking(), 2, num_workers=2)
    iterator: Any = iter(loader)
    for batch in iterator:
        del batch
    assert not iterator._batches.executor._lent


def memory_of(iterator: Any) -> int:
    """Bytes of memory that the slots have."""
    return os.fstat(iterator._batches.executor.ring.file.fd).st_blocks * 512 - BOARD


@pytest.mark.parametrize("at", [0, 20])
@pytest.mark.parametrize("pure", [False, True])
def test_a_batch_unlike_the_others_costs_its_own_memory_and_only_while_it_lives(pure: bool, at: int) -> None:
    """Three in flight, two held, and room for one more are 600 kB; the large one is 20 MB."""
    usual, odd = 100_000, 20_000_000
    frames = Frames([odd if number == at else usual for number in range(60)])
    frames.pure = pure  # type: ignore[attr-defined]
    iterator: Any = iter(DataLoader(frames, 1, num_workers=1, prefetch_factor=3, executor="process"))
    most, after = 0, []
    for number, batch in enumerate(iterator):
        assert batch.shape == (1, usual if number != at else odd)
        assert (batch == number).all()
        blocks = memory_of(iterator)
        most = max(most, blocks)
        if number > at + 10:
            after.append(blocks)
        del batch
    assert most <= 1.05 * (odd + 6 * usual)
    assert max(after) <= 1.05 * 7 * usual


def test_a_batch_unlike_the_others_comes_by_the_ring() -> None:
    loader = loader_of(Frames([100_000] * 40 + [2_000_000] * 2 + [100_000] * 40))
    for number, batch in enumerate(loader):
        assert (batch[1] == (2 * number + 1) % 251).all()
        del batch
    assert loader.stats()["ways"] == {"ring": 41}


def test_batches_that_grow_slowly_have_no_more_memory_than_there_are_of_them() -> None:
    sizes = [int(100_000 * 1.03**number) for number in range(100)]
    iterator: Any = iter(DataLoader(Frames(sizes), 1, num_workers=1, prefetch_factor=3, executor="process"))
    for number, batch in enumerate(iterator):
        assert batch.shape == (1, sizes[number])
        if number > 5:
            assert memory_of(iterator) <= 6 * 1.2 * 1.03**3 * sizes[number] + 100_000
        del batch


def test_an_error_in_a_batch_that_had_its_slot_grow_gives_the_memory_back() -> None:
    how: dict[str, Any] = {"num_workers": 2, "prefetch_factor": 2, "executor": "process"}
    loader = DataLoader(Frames([100_000] * 60), 1, collate_fn=grows_and_fails, **how)
    iterator: Any = iter(loader)
    failed = 0
    while True:
        try:
            batch = next(iterator)
        except StopIteration:
            break
        except LookupError:
            failed += 1
        else:
            del batch
    assert failed == 6
    assert not iterator._batches.executor._lent
    assert memory_of(iterator) <= 8 * 100_352


def grows_and_fails(samples: Any) -> Any:
    """A collate function that asks for much memory, and then sometimes fails."""
    if samples[0][0] % 10 == 9:
        assert place((10_000_000,), torch.uint8) is not None or not samples[0][0] > 9
        raise LookupError("bad luck")
    return torch.stack(samples)
