"""With a seed there is one truth: the same batches, bit for bit, wherever they are made and by however many."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from full_run import full_only
from interpreter_support import FULL
from loader_support import (
    Draws,
    GlobalDraws,
    Where,
    batches,
    draw_load,
    global_load,
    noisy_collate,
    plain,
)
from pairwise import pairwise
from torch.utils.data import Subset

from penstock import DataLoader, Manifest, MPDataset, RankDataset

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

THREADS = [{"executor": "thread", "num_workers": count} for count in (1, 2, 3)]
PROCESSES = [
    {"num_workers": count, "multiprocessing_context": method, "persistent_workers": persistent}
    for method, count, persistent in pairwise(["fork", "forkserver"], [1, 2], [False, True])
]
PROCESSES += [{"num_workers": 2, "multiprocessing_context": "spawn", "persistent_workers": True}]
if FULL:
    PROCESSES += [{"num_workers": 1, "multiprocessing_context": "spawn", "persistent_workers": False}]
FORK = {"num_workers": 2, "multiprocessing_context": "fork"}


def name_of(how: dict[str, Any]) -> str:
    return " ".join(str(value) for value in how.values())


@contextmanager
def untouched_generators() -> Iterator[None]:
    """The caller's generators of Python and NumPy stay as they are, and torch's moves by one draw for each pass."""
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    python, legacy = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index,union-attr]
    yield
    assert random.getstate() == python
    assert np.random.get_state()[1].tolist() == legacy  # type: ignore[index,union-attr]


def passes(make: Callable[[], DataLoader[Any]], count: int = 2) -> list[Any]:
    with untouched_generators():
        loader = make()
        seen = [batches(loader) for _ in range(count)]
        drawn = torch.get_rng_state()
        torch.manual_seed(3)
        for _ in range(1 if loader.num_workers and loader.executor == "auto" and loader.persistent_workers else count):
            torch.empty((), dtype=torch.int64).random_()
        assert torch.equal(drawn, torch.get_rng_state()), "torch's own base seed, one for each iterator, and no more"
    return seen


@pytest.fixture(scope="module")
def truth() -> list[Any]:
    """Two epochs with random augmentation, made inline."""
    return passes(lambda: DataLoader(GlobalDraws(23), 4, shuffle=True, seed=7))


def test_epochs_and_samples_differ(truth: list[Any]) -> None:
    first, second = (
        {
            index: tuple(own) + tuple(drawn)
            for batch in epoch
            for index, own, drawn in zip(
                batch["index"], zip(*batch["own"], strict=True), zip(*batch["global"], strict=True), strict=True
            )
        }
        for epoch in truth
    )
    assert sorted(first) == sorted(second) == list(range(23))
    assert len(set(first.values()) | set(second.values())) == 46
    assert [batch["index"] for batch in truth[0]] != [batch["index"] for batch in truth[1]]


@full_only("imports everything anew", but=["2 forkserver False", "1 fork False", "1 forkserver True"])
@pytest.mark.parametrize("how", PROCESSES, ids=name_of)
def test_processes(truth: list[Any], how: dict[str, Any]) -> None:
    assert passes(lambda: DataLoader(GlobalDraws(23), 4, shuffle=True, seed=7, **how)) == truth


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("how", THREADS, ids=name_of)
def test_threads(truth: list[Any], how: dict[str, Any], persistent: bool) -> None:
    own = [[{name: batch[name] for name in ("index", "own", "more")} for batch in epoch] for epoch in truth]
    make = lambda: DataLoader(Draws(23), 4, shuffle=True, seed=7, persistent_workers=persistent, **how)  # noqa: E731
    assert passes(make) == own


def test_batch_size_and_prefetch_do_not_matter(truth: list[Any]) -> None:
    def flat(epoch: list[Any]) -> list[Any]:
        return [
            sample
            for batch in epoch
            for sample in zip(
                batch["index"], zip(*batch["own"], strict=True), zip(*batch["global"], strict=True), strict=True
            )
        ]

    expected = [flat(epoch) for epoch in truth]
    for how in ({"batch_size": 23}, {"batch_size": 1}, {"batch_size": 5, "prefetch_factor": 7, **FORK}):
        assert [flat(e) for e in passes(lambda: DataLoader(GlobalDraws(23), shuffle=True, seed=7, **how))] == expected  # noqa: B023


@full_only("workers for each", but=["None", "draw_load"])
@pytest.mark.parametrize("how", [{}, THREADS[1], FORK], ids=name_of)
@pytest.mark.parametrize("load", [draw_load, global_load, None])
def test_rank_dataset(write_manifest: Callable[..., Path], how: dict[str, Any], load: Any) -> None:
    if load is global_load and how.get("executor") == "thread":
        pytest.skip("threads promise penstock.generator only")
    manifest = Manifest.open(write_manifest(30))

    def make(**how: Any) -> DataLoader[Any]:
        dataset = RankDataset(manifest, rank=1, world_size=2, mini_epochs=2, seed=5, load=load)
        return DataLoader(dataset, batch_size=4, **how)

    expected = passes(make, 3)
    assert passes(lambda: make(**how), 3) == expected

    stream = MPDataset(manifest, batch_size=4, rank=1, world_size=2, seed=5, load=load)
    whole = RankDataset(manifest, rank=1, world_size=2, seed=5, load=load)
    assert passes(lambda: DataLoader(stream, batch_size=4, **how), 1) == passes(
        lambda: DataLoader(whole, batch_size=4), 1
    )


@pytest.mark.parametrize("how", [{}, THREADS[1], FORK], ids=name_of)
def test_collate_functions_draw_the_same_too(how: dict[str, Any]) -> None:
    expected = passes(lambda: DataLoader(Draws(20), 4, seed=7, collate_fn=noisy_collate))
    assert passes(lambda: DataLoader(Draws(20), 4, seed=7, collate_fn=noisy_collate, **how)) == expected
    assert len({value for epoch in expected for _, value in epoch}) == 10


@pytest.mark.parametrize("how", [{}, THREADS[1], FORK], ids=name_of)
@pytest.mark.parametrize("data", [Draws, GlobalDraws])
def test_every_sample_of_a_subset_has_its_own_generator(how: dict[str, Any], data: type[Draws]) -> None:
    """torch's Subset has ``__getitems__``, which is a loop: a batch must not share one generator there."""
    if data is GlobalDraws and how.get("executor") == "thread":
        pytest.skip("threads promise penstock.generator only")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        subset = Subset(Subset(data(40), range(30)), range(3, 23))
        found = passes(lambda: DataLoader(subset, 4, shuffle=True, seed=7, **how))
        alone = passes(lambda: DataLoader(subset, 1, shuffle=True, seed=7))
    assert [d for epoch in found for batch in epoch for d in zip(*batch["own"], strict=True)] == [
        d for epoch in alone for batch in epoch for d in zip(*batch["own"], strict=True)
    ]


def test_ranks_draw_differently(write_manifest: Callable[..., Path]) -> None:
    manifest = Manifest.open(write_manifest(40))

    def drawn(loader: DataLoader[Any]) -> set[float]:
        return {
            value for batch in loader for value in (batch[1] if isinstance(batch, list) else batch["own"][0]).tolist()
        }

    ranks = [
        drawn(DataLoader(RankDataset(manifest, rank=rank, world_size=2, load=draw_load), batch_size=4))
        for rank in (0, 1)
    ]
    assert len(ranks[0] | ranks[1]) == 40


def test_foreign_samplers_draw_differently_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
        found.append(batches(DataLoader(Draws(8), sampler=range(8), seed=1)))
        assert found[-1] == batches(DataLoader(Draws(8), sampler=range(8), seed=1))
    assert found[0][0]["own"] != found[1][0]["own"]


def test_samplers_over_a_share_draw_differently_on_every_rank(write_manifest: Callable[..., Path]) -> None:
    import penstock as ps

    manifest = Manifest.open(write_manifest(40))
    drawn: set[float] = set()
    for rank in (0, 1):
        data = RankDataset(manifest, rank=rank, world_size=2, load=draw_load)
        loader = DataLoader(data, batch_size=4, sampler=ps.RandomSampler(data, shuffle="global", seed=1))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RANK", str(rank))
            patch.setenv("WORLD_SIZE", "2")
            drawn |= {value for batch in loader for value in batch[1].tolist()}
    assert len(drawn) == 40


def test_all_threads_work_and_share_one_data_set() -> None:
    loader: DataLoader[Any] = DataLoader(Where(64), batch_size=32, num_workers=3, executor="thread", collate_fn=list)
    names = {name for batch in loader for name, _, _ in batch}
    assert names <= {f"penstock-worker-{number}" for number in range(3)}
    assert len(names) >= 2


def test_worker_info_has_the_users_data_set() -> None:
    for seed in (None, 1):
        loader: DataLoader[Any] = DataLoader(Where(4), batch_size=2, num_workers=2, collate_fn=list, seed=seed)
        assert [[(worker, kind) for _, worker, kind in batch] for batch in loader] == [
            [(0, "Where")] * 2,
            [(1, "Where")] * 2,
        ]


def test_impure_data_sets_are_warned_about_in_threads() -> None:
    with pytest.warns(UserWarning, match=r"does not declare itself pure") as caught:
        DataLoader(GlobalDraws(4), num_workers=2, executor="thread", seed=1)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batches(DataLoader(Draws(4), num_workers=2, executor="thread", seed=1))
        batches(DataLoader(GlobalDraws(4), num_workers=2, executor="thread"))  # no seed, no promise


def test_generator_follows_the_base_seed_without_a_seed() -> None:
    for how in ({}, THREADS[1], FORK):
        found = []
        for _ in range(2):
            torch.manual_seed(11)
            found.append([batches(DataLoader(Draws(9), 2, shuffle=True, **how)) for _ in range(2)])
        assert found[0] == found[1]
        assert found[0][0] != found[0][1]
        assert plain(found[0][0][0]["own"][0]) != plain(found[0][0][1]["own"][0])
