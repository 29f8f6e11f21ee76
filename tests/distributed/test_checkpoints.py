"""Whatever a state holds comes through torch.distributed.checkpoint, into a loader that has not begun."""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from entries_support import opened, through_checkpoint
from state_support import IteratorStream, StatefulSampler, StatefulStream, TensorMap
from torch.utils.data import Dataset

import penstock as ps

BATCHES = 3


class Slow(Dataset[int]):
    """The first batch is late."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        time.sleep(0.5 if index < 4 else 0)
        return index


class Odd(TensorMap):
    """Its state is what JSON cannot hold, or would change."""

    def state_dict(self) -> dict[str, Any]:
        odd = {"tuple": (1, 2), 3: {4.5}, "array": np.arange(3), "ordered": OrderedDict(a=1)}
        return {**super().state_dict(), "odd": odd}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        assert state["odd"]["tuple"] == (1, 2)
        assert state["odd"][3] == {4.5}
        assert state["odd"]["array"].tolist() == [0, 1, 2]
        assert isinstance(state["odd"]["ordered"], OrderedDict)


def mixture() -> Any:
    return ps.Mixture([(list(range(300)), 1), (list(range(1000, 1300)), 1)], rank=0, world_size=1)


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "batches out of order": (lambda: ps.DataLoader(Slow(), 4, num_workers=2, in_order=False), "ahead"),
    "a stream's places": (lambda: ps.DataLoader(StatefulStream(40), 4, num_workers=2), "workers"),
    "its iterators' places": (lambda: ps.DataLoader(IteratorStream(40), 4, num_workers=2), "workers"),
    "tensors": (lambda: ps.DataLoader(TensorMap(40), 4, num_workers=1), "workers"),
    "odd objects": (lambda: ps.DataLoader(Odd(40), 4), "workers"),
    "a user's sampler": (lambda: ps.DataLoader(range(40), 4, sampler=StatefulSampler(40)), "entropy"),
    "draws": (lambda: ps.DataLoader(range(40), 4, shuffle=True), "base_seed"),
    "changed weights": (lambda: ps.DataLoader(mixture(), 4), "weights"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_fresh_loader_has_the_rest_of_the_batches(name: str, tmp_path: Path) -> None:
    make, entry = CASES[name]
    loader, fresh = make(), make()
    if name == "changed weights":
        loader.dataset.set_weights([1, 3], at=0)
    iterator = iter(loader)
    had = [next(iterator) for _ in range(BATCHES)]
    assert f"{entry!r}:" in repr(opened(loader.state_dict()))
    through_checkpoint(loader, fresh, tmp_path / "checkpoint")
    rest, found = list(iterator), list(fresh)
    assert len(had) == BATCHES
    if name != "batches out of order":
        assert repr(found) == repr(rest)
    else:
        assert sorted(row for batch in had + found for row in batch.tolist()) == list(range(40))


def test_the_bytes_of_a_checkpoint(tmp_path: Path) -> None:
    class Letter:
        def state_dict(self) -> dict[str, Any]:
            return {"x": "x"}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            """Nothing."""

    def loader() -> ps.DataLoader[int]:
        return ps.DataLoader(range(5000), 64, shuffle="global", seed=0)  # type: ignore[arg-type]

    begun = loader()
    list(itertools.islice(begun, BATCHES))
    theirs = through_checkpoint(Letter(), Letter(), tmp_path / "theirs")
    size = through_checkpoint(begun, loader(), tmp_path / "loader")
    assert size - theirs < 500 < theirs
    torch.save(begun.state_dict(), tmp_path / "state")
    assert torch.load(tmp_path / "state", weights_only=True) == begun.state_dict()
