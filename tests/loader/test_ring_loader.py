"""The ring under a loader: batches that are kept, and batches that grow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from process_support import Frames
from torch.utils.data import Dataset

from penstock import DataLoader


def loader_of(frames: Frames, **options: Any) -> DataLoader[Any]:
    return DataLoader(frames, 2, num_workers=2, executor="process", **options)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_batches_that_are_kept_are_copied_with_one_warning() -> None:
    loader = loader_of(Frames([5000] * 40))
    with pytest.warns(UserWarning, match="being kept: from now on") as warned:
        batches = list(loader)
    assert len([w for w in warned if "being kept" in str(w.message)]) == 1
    for number, batch in enumerate(batches):
        assert (batch[0] == 2 * number).all()
        assert (batch[1] == 2 * number + 1).all()


@pytest.mark.filterwarnings("ignore:This DataLoader will create", "error:more than")
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


@pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:more than")
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


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_batches_that_need_no_slot_give_theirs_back() -> None:
    loader = DataLoader(Shrinking(), 2, num_workers=2)
    iterator: Any = iter(loader)
    ring = iterator._batches.executor.pool.ring
    for batch in iterator:
        del batch
    assert ring.has_free
