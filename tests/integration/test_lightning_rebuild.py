"""Lightning's own function that makes a loader anew for a rank, as its Trainer calls it after a hook."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from integration_support import Share
from torch.utils.data import ConcatDataset
from torch.utils.data import DataLoader as TorchDataLoader

import penstock as ps
from penstock.errors import PartitionError

pytest.importorskip("lightning.pytorch")
from lightning.fabric.utilities.data import _replace_dunder_methods
from lightning.pytorch.trainer.connectors import data_connector
from lightning.pytorch.trainer.states import RunningStage

N = 24


class Rows(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> int:
        return index


def on_two_ranks(hook: Callable[[], ps.DataLoader[Any]]) -> list[ps.DataLoader[Any]]:
    """What each of two ranks trains from, where a hook returns a loader."""
    with _replace_dunder_methods(TorchDataLoader, "dataset"), _replace_dunder_methods(torch.utils.data.BatchSampler):
        loaders = [hook() for _ in range(2)]
    samplers = [torch.utils.data.DistributedSampler(Rows(), 2, rank, shuffle=True) for rank in range(2)]
    return [
        data_connector._update_dataloader(loader, sampler) for loader, sampler in zip(loaders, samplers, strict=True)
    ]


def seen(loaders: list[ps.DataLoader[Any]]) -> list[list[list[int]]]:
    return [[batch.tolist() for batch in loader] for loader in loaders]


class Star(ps.DataLoader[Any]):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


class Extra(ps.DataLoader[Any]):
    def __init__(self, dataset: Any, *args: Any, extra: str | None = None, **kwargs: Any) -> None:
        self.extra = extra
        super().__init__(dataset, *args, **kwargs)


class Positional(ps.DataLoader[Any]):
    def __init__(self, dataset: Any, size: int, /, **kwargs: Any) -> None:
        super().__init__(dataset, size, **kwargs)


@pytest.mark.parametrize("kind", [ps.DataLoader, Star, Extra, Positional])
def test_arguments_by_position_stay(kind: Any) -> None:
    """Also those of subclasses, whatever form their constructors have."""
    given = {"extra": "e"} if kind is Extra else {}
    loaders = on_two_ranks(lambda: kind(Rows(), 4, shuffle="global", seed=7, **given))
    found = seen(loaders)
    assert [len(batch) for batch in found[0]] == [4, 4, 4]
    assert sorted(row for rank in found for batch in rank for row in batch) == list(range(N))
    assert all(loader.seed == 7 and getattr(loader, "extra", "e") == "e" for loader in loaders)


@pytest.mark.parametrize("assigned", [False, True])
def test_the_form_of_batches_stays(assigned: bool) -> None:
    def hook() -> ps.DataLoader[Any]:
        loader: ps.DataLoader[Any] = ps.DataLoader(Rows(), 4, **({} if assigned else {"output": "numpy"}))
        if assigned:
            loader.output = "numpy"
        return loader

    loaders = on_two_ranks(hook)
    assert [loader.output for loader in loaders] == ["numpy"] * 2
    assert {type(batch) for loader in loaders for batch in loader} == {np.ndarray}


def test_the_device_stays() -> None:
    loaders = on_two_ranks(lambda: ps.DataLoader(Rows(), 4, device="meta"))
    assert {batch.device.type for loader in loaders for batch in loader} == {"meta"}


def test_a_copied_loader_is_dealt_as_well() -> None:
    def hook() -> ps.DataLoader[Any]:
        loader = copy.copy(ps.DataLoader(Rows(), 4, shuffle="global", seed=3))
        loader.num_workers = 2
        loader.mine = "x"  # type: ignore[attr-defined]
        return loader

    loaders = on_two_ranks(hook)
    assert sorted(row for rank in seen(loaders) for batch in rank for row in batch) == list(range(N))
    assert [(loader.num_workers, loader.mine) for loader in loaders] == [(2, "x")] * 2  # type: ignore[attr-defined]


def test_a_loader_that_was_read_in_the_hook_begins_anew() -> None:
    def hook() -> ps.DataLoader[Any]:
        loader = ps.DataLoader(Rows(), 4, shuffle="global", seed=3)
        loader.num_workers = 2
        next(iter(loader))
        return loader

    assert sorted(row for rank in seen(on_two_ranks(hook)) for batch in rank for row in batch) == list(range(N))


@pytest.mark.parametrize("recorded", [True, False])
def test_the_name_of_an_order_stays(recorded: bool) -> None:
    """Lightning takes it for True; without a name it shuffles what it trains on."""

    def hook() -> ps.DataLoader[Any]:
        loader = ps.DataLoader(Rows(), 4, shuffle="none", seed=1)
        if not recorded:  # as where our loader is first imported in the hook
            for name in [name for name in vars(loader) if name.startswith("__pl_")]:
                del vars(loader)[name]
        return loader

    found = seen(on_two_ranks(hook))
    assert [row for batch in found[0] for row in batch] == list(range(0, N, 2))


# All that the Trainer does with a loader on one of two ranks.


def trainers(loader: Any, rank: int, mode: Any = RunningStage.TRAINING) -> Any:
    """The loader that the Trainer reads."""
    connector: Any = data_connector._DataConnector.__new__(data_connector._DataConnector)
    connector.trainer = SimpleNamespace(
        _accelerator_connector=SimpleNamespace(use_distributed_sampler=True, is_distributed=True),
        distributed_sampler_kwargs={"num_replicas": 2, "rank": rank},
        overfit_batches=0,
        state=SimpleNamespace(fn="fit"),
    )
    return connector._prepare_dataloader(loader, True, mode)


def named(shuffle: str, **options: Any) -> ps.RandomSampler:
    return ps.RandomSampler(Rows(), shuffle=shuffle, seed=3, **options)


BLOCKS = {"block_size": 4, "window": 2}
ORDERS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "block": (lambda: ps.DataLoader(Rows(), 4, shuffle="block", seed=3), lambda: named("block")),
    "split=False": (lambda: ps.DataLoader(Rows(), 4, shuffle="global", seed=3, split=False), lambda: named("global")),
    "split=True": (lambda: ps.DataLoader(Rows(), 4, shuffle="global", seed=3, split=True), lambda: named("global")),
    "none": (lambda: ps.DataLoader(Rows(), 4, shuffle="none"), lambda: range(N)),
    "sampler": (lambda: ps.DataLoader(Rows(), 4, sampler=named("block", **BLOCKS)), lambda: named("block", **BLOCKS)),
    "batch sampler": (
        lambda: ps.DataLoader(Rows(), batch_sampler=ps.BatchSampler(named("global"), 4, False)),
        lambda: named("global"),
    ),
    "somebody's share": (
        lambda: ps.DataLoader(Rows(), 4, sampler=Share(N, 2, int(os.environ["RANK"]))),
        lambda: range(N),
    ),
    "groups": (
        lambda: ps.DataLoader(Rows(), batch_sampler=ps.GroupedBatchSampler(named("global"), [0] * N, 4)),
        lambda: named("global"),
    ),
}


@pytest.mark.parametrize("recorded", [True, False], ids=["from a hook", "made before"])
@pytest.mark.parametrize("kind", ORDERS)
def test_ranks_share_out_the_loaders_own_order(monkeypatch: pytest.MonkeyPatch, kind: str, recorded: bool) -> None:
    make, order = ORDERS[kind]
    monkeypatch.setenv("WORLD_SIZE", "2")
    ranks = []
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        with contextlib.ExitStack() as hook:
            if recorded:
                hook.enter_context(_replace_dunder_methods(TorchDataLoader, "dataset"))
                hook.enter_context(_replace_dunder_methods(torch.utils.data.BatchSampler))
            loader = make()
        ranks.append(seen([trainers(loader, rank)])[0])
    steps = [sorted(row for batch in batches for row in batch) for batches in zip(*ranks, strict=True)]
    expected = list(order())
    assert steps == [sorted(expected[begin : begin + 8]) for begin in range(0, N, 8)]


def test_a_share_that_would_be_split_again_to_predict_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(PartitionError, match=r"this Share already splits by rank.*use_distributed_sampler=False"):
        trainers(ps.DataLoader(Rows(), 4, sampler=Share(N, 2, 0)), 0, RunningStage.PREDICTING)


@pytest.mark.parametrize("shuffle", [None, True])
def test_shares_inside_of_others_are_not_split_again(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, shuffle: bool | None
) -> None:
    (tmp_path / "rows.txt").write_text("".join(f"{n}.jpg {n}\n" for n in range(N)))
    shares = ps.RankDataset(str(tmp_path / "rows.txt"), rank=0, world_size=2)
    loader: Any = ps.DataLoader(ConcatDataset([shares, shares]), 4, shuffle=shuffle)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert trainers(loader, 0) is loader
    predicts = trainers(ps.DataLoader(shares, 4, collate_fn=list), 0, RunningStage.PREDICTING)
    assert sum(len(batch) for batch in predicts) == N // 2
    with _replace_dunder_methods(TorchDataLoader, "dataset"):
        recorded = ps.DataLoader(shares, 4, shuffle=False, collate_fn=list)
    for in_order in (recorded, ps.DataLoader(shares, 4, shuffle=False, collate_fn=list)):
        predicts = trainers(in_order, 0, RunningStage.PREDICTING)
        assert predicts is not in_order
        assert [row for batch in predicts for _, _, row in batch] == list(range(0, N, 2))
