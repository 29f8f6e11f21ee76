"""Several ranks that nobody deals samples to: what is said of it, once, and where there is nothing to say."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loader_support import Range, Stream

import penstock as ps
from penstock.loader import who_splits

WORDS = "each of the 2 ranks reads all of this Range"


@pytest.fixture(autouse=True)
def _two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torchrun says it; and nothing has been said yet."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(who_splits, "_warned", False)


def said(loader: ps.DataLoader[Any], epochs: int = 1) -> list[warnings.WarningMessage]:
    """What is said of ranks in some passes."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(epochs):
            next(iter(loader))
    return [each for each in caught if "ranks reads all of" in str(each.message)]


SHUFFLED: dict[str, Callable[[], ps.DataLoader[Any]]] = {
    "global": lambda: ps.DataLoader(Range(8), shuffle="global"),
    "block": lambda: ps.DataLoader(Range(8), shuffle="block", seed=4),
    "seed": lambda: ps.DataLoader(Range(8), shuffle=True, seed=4),
    "sampler": lambda: ps.DataLoader(Range(8), sampler=ps.RandomSampler(Range(8), shuffle="global", seed=4)),
    "batch sampler": lambda: ps.DataLoader(
        Range(8), batch_sampler=ps.BatchSampler(ps.RandomSampler(Range(8), shuffle="global", seed=4), 2, False)
    ),
    "iterations": lambda: ps.DataLoader(
        Range(8),
        batch_sampler=ps.IterationBasedBatchSampler(
            ps.BatchSampler(ps.RandomSampler(Range(8), shuffle="global", seed=4), 2, False), 9
        ),
    ),
    "unbatched": lambda: ps.DataLoader(Range(8), batch_size=None, shuffle="global"),
    "weights": lambda: ps.DataLoader(Range(8), sampler=ps.WeightedRandomSampler([1.0] * 8, 8, seed=4)),
}


@pytest.mark.parametrize("kind", SHUFFLED)
def test_an_order_that_all_ranks_draw_alike_is_said_once(kind: str) -> None:
    (message,) = said(SHUFFLED[kind](), epochs=3)
    assert WORDS in str(message.message)
    assert message.category is UserWarning
    assert Path(message.filename) == Path(__file__), "it points to the line that begins the pass"
    assert not said(SHUFFLED[kind]())


def test_the_message_says_what_to_write() -> None:
    """What it says to write is among `DEALT`."""
    (message,) = said(ps.DataLoader(Range(8), shuffle="block", seed=4))
    assert "in the same order: pass split=True to the DataLoader" in str(message.message)
    assert "pass split=False" in str(message.message)
    (message,) = said_anew(ps.DataLoader(Range(8), sampler=ps.RandomSampler(Range(8), shuffle="block", seed=4)))
    assert "pass a ps.DistributedSampler (for any other order, a ps.GroupedBatchSampler)" in str(message.message)
    assert "pass one with num_replicas=1, rank=0 (world_size=1) to let every rank read all" in str(message.message)


def said_anew(loader: ps.DataLoader[Any]) -> list[warnings.WarningMessage]:
    who_splits._warned = False
    return said(loader)


@pytest.fixture
def rows(tmp_path: Path) -> str:
    path = tmp_path / "rows.txt"
    path.write_text("".join(f"{row}.jpg {row}\n" for row in range(8)))
    return str(path)


DEALT: dict[str, Callable[[], ps.DataLoader[Any]]] = {
    "ours": lambda: ps.DataLoader(Range(8), sampler=ps.DistributedSampler(Range(8), shuffle="global", seed=4)),
    "torch's": lambda: ps.DataLoader(
        Range(8), seed=4, sampler=torch.utils.data.DistributedSampler(Range(8), num_replicas=2, rank=1)
    ),
    "all on each rank": lambda: ps.DataLoader(
        Range(8), sampler=ps.DistributedSampler(Range(8), num_replicas=1, rank=0, shuffle="global", seed=4)
    ),
    "iterations": lambda: ps.DataLoader(
        Range(8),
        batch_sampler=ps.IterationBasedBatchSampler(
            ps.BatchSampler(ps.DistributedSampler(Range(8), shuffle="global", seed=4), 2, False), 9
        ),
    ),
    "groups": lambda: ps.DataLoader(Range(8), batch_sampler=ps.GroupedBatchSampler(weights(), [0] * 8, 2)),
    "all groups on each rank": lambda: ps.DataLoader(
        Range(8), batch_sampler=ps.GroupedBatchSampler(weights(), [0] * 8, 2, world_size=1, rank=0)
    ),
    "split=True": lambda: ps.DataLoader(Range(8), shuffle="block", seed=4, split=True),
    "split=False": lambda: ps.DataLoader(Range(8), shuffle="block", seed=4, split=False),
    "endless": lambda: ps.DataLoader(Range(8), sampler=ps.InfiniteSampler(Range(8), seed=4)),
}


def weights() -> Any:
    return ps.WeightedRandomSampler([1.0] * 8, 8, seed=4)


@pytest.mark.parametrize("kind", DEALT)
def test_samplers_that_deal_are_silent(kind: str) -> None:
    assert not said(DEALT[kind]())


def test_data_sets_that_deal_are_silent(rows: str) -> None:
    share = ps.RankDataset(rows, load=_row, seed=4)
    assert not said(ps.DataLoader(share, seed=4))
    order = ps.RandomSampler(range(3), shuffle="global", seed=4)
    fixed = ps.RankDataset(rows, load=_row, shuffle="none", remainder="uneven")
    assert not said(ps.DataLoader(torch.utils.data.Subset(fixed, [0, 1, 2]), sampler=order))
    assert not said(ps.DataLoader(ps.MPDataset(rows, load=_row, seed=4, batch_size=2), batch_size=2))


def _row(record: Any) -> int:
    return int(record.row)


UNSEEDED: dict[str, Callable[[], ps.DataLoader[Any]]] = {
    "in order": lambda: ps.DataLoader(Range(8), batch_size=4, seed=4),
    "no seed": lambda: ps.DataLoader(Range(8), shuffle=True),
    "a generator, which may differ": lambda: ps.DataLoader(
        Range(8), shuffle=True, generator=torch.Generator().manual_seed(4)
    ),
    "a stream": lambda: ps.DataLoader(Stream(8)),
    "a list": lambda: ps.DataLoader(Range(8), sampler=[3, 1]),
}


@pytest.mark.parametrize("kind", UNSEEDED)
def test_what_the_ranks_need_not_draw_alike_is_silent(kind: str) -> None:
    assert not said(UNSEEDED[kind]())


def test_one_rank_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert not said(ps.DataLoader(Range(8), shuffle="global"))
    monkeypatch.delenv("RANK")
    monkeypatch.delenv("WORLD_SIZE")
    assert not said(ps.DataLoader(Range(8), shuffle="global"))


def test_making_a_loader_says_nothing(recwarn: pytest.WarningsRecorder) -> None:
    """Accelerate and Lightning deal a loader after it was made."""
    ps.DataLoader(Range(8), shuffle="global").state_dict()
    assert not recwarn.list
