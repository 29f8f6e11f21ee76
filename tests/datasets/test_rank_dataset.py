"""`RankDataset`: who gets which rows, when; and that nobody else's generators or epochs are touched."""

from __future__ import annotations

import copy
import pickle
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy  # its parts are imported when they are named
import torch
from hypothesis import given
from hypothesis import strategies as st
from interpreter_support import METHODS
from loader_support import draw_load
from torch.utils.data import DataLoader as TorchDataLoader

from penstock import Manifest, RankDataset
from penstock.errors import ConfigError, ManifestError, OrderError, PartitionError, PenstockError

MOST = 60


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """Sixty rows; slices of it are the smaller manifests."""
    path = tmp_path_factory.mktemp("rows") / "meta.txt"
    path.write_text("".join(f"class {i // 10}/img {i}.jpg {i // 10}\n" for i in range(MOST)))
    return Manifest.open(path)


@pytest.fixture
def manifest(write_manifest: Callable[..., Path]) -> Manifest:
    return Manifest.open(write_manifest(50))


def had(dataset: RankDataset) -> list[int]:
    return [row for _, _, row in dataset.__getitems__(range(len(dataset)))]


SHUFFLES: dict[str, dict[str, Any]] = {
    "global": {},
    "none": {"shuffle": "none"},
    "block": {"shuffle": "block", "block_size": 3, "window": 2},
    "group": {"group": 4},
}


@given(
    n=st.integers(0, MOST),
    world=st.integers(1, 9),
    mini_epochs=st.integers(1, 5),
    remainder=st.sampled_from(["pad", "drop", "uneven"]),
    kind=st.sampled_from(list(SHUFFLES)),
    seed=st.integers(-(1 << 63), (1 << 64) - 1),
    epoch=st.integers(0, 5),
)
def test_union_is_the_file_and_the_declared_padding(
    rows: Manifest, n: int, world: int, mini_epochs: int, remainder: str, kind: str, seed: int, epoch: int
) -> None:
    manifest = rows[:n]
    found: Counter[int] = Counter()
    lengths: dict[int, set[int]] = {}
    in_order: list[int] = []
    share = -(-n // (world * mini_epochs))
    by_rank = []
    for rank in range(world):
        dataset = RankDataset(
            manifest,
            rank=rank,
            world_size=world,
            mini_epochs=mini_epochs,
            remainder=remainder,
            seed=seed,
            **SHUFFLES[kind],
        )
        dataset.set_epoch(epoch)
        parts = []
        for mini_epoch in range(mini_epochs):
            dataset.set_mini_epoch(mini_epoch)
            parts.append(had(dataset))
            lengths.setdefault(mini_epoch, set()).add(len(dataset))
            found.update(parts[-1])
        by_rank.append(parts)
    for mini_epoch in range(mini_epochs):
        for i in range(max(len(parts[mini_epoch]) for parts in by_rank)):
            in_order += [parts[mini_epoch][i] for parts in by_rank if i < len(parts[mini_epoch])]
    every = set(range(n))
    if remainder == "pad":
        assert all(sizes == {share} for sizes in lengths.values())
        assert set(found) == every
        assert in_order[n:] == (in_order[:n] * (world * mini_epochs))[: share * world * mini_epochs - n], (
            "from the start"
        )
    elif remainder == "drop":
        size = n // (world * mini_epochs)
        assert all(sizes == {size} for sizes in lengths.values())
        assert all(count == 1 for count in found.values())
        assert len(found) == size * world * mini_epochs
    else:
        assert found == Counter(every)
    if kind == "none":
        assert in_order[:n] == list(range(len(in_order[:n])))


def test_items(rows: Manifest) -> None:
    dataset = RankDataset(rows, shuffle="none")
    assert dataset[11] == ("class 1/img 11.jpg", 1, 11)
    assert dataset[-1] == dataset[np.int64(59)] == ("class 5/img 59.jpg", 5, 59)
    assert dataset.__getitems__([3, -2, 3]) == [dataset[3], dataset[58], dataset[3]]
    assert list(dataset) == dataset.__getitems__(range(60))  # type: ignore[call-overload]
    for outside in (60, -61):
        with pytest.raises(IndexError):
            dataset[outside]
        with pytest.raises(IndexError):
            dataset.__getitems__([0, outside])
    with pytest.raises(TypeError):
        dataset["0"]  # type: ignore[index]
    empty = RankDataset(rows[:0])
    assert len(empty) == 0
    assert list(empty) == []  # type: ignore[call-overload]


def test_one_by_one_is_the_same_as_at_once(rows: Manifest) -> None:
    for options in ({}, {"load": draw_load}):
        dataset = RankDataset(rows[:57], rank=1, world_size=3, mini_epochs=2, seed=4, **options)  # type: ignore[arg-type]
        for place in range(3):
            indices = list(range(len(dataset)))
            assert [dataset[i] for i in indices] == dataset.__getitems__(indices), place
            dataset.next_mini_epoch()


def test_epochs_share_nothing(rows: Manifest) -> None:
    """The original reused the groups of one epoch in the next: seeds were added up."""
    orders = {}
    for seed in range(3):
        for epoch in range(3):
            dataset = RankDataset(rows, seed=seed)
            dataset.set_epoch(epoch)
            orders[seed, epoch] = had(dataset)
    assert len({tuple(order) for order in orders.values()}) == 9
    assert orders[1, 0] != orders[0, 1]
    same_place = sum(a == b for a, b in zip(orders[1, 0], orders[0, 1], strict=True))
    assert same_place < 10
    groups = set()
    for epoch in range(4):
        dataset = RankDataset(rows, seed=0, group=6)
        dataset.set_epoch(epoch)
        order = had(dataset)
        groups |= {tuple(row % 10 for row in order[i : i + 10]) for i in range(0, 60, 10)}
    assert len(groups) == 24


def test_all_ranks_and_processes_agree_on_the_order(rows: Manifest) -> None:
    whole = had(RankDataset(rows, seed=3))
    parts = [had(RankDataset(rows, rank=rank, world_size=4, seed=3)) for rank in range(4)]
    assert [row for together in zip(*parts, strict=True) for row in together] == whole


@pytest.mark.parametrize("options", [{}, {"group": 8}, {"shuffle": "block", "block_size": 16, "window": 64}])
def test_classes_are_spread_over_ranks_and_mini_epochs(tmp_path: Path, options: dict[str, Any]) -> None:
    """On a class-sorted file: with eight groups on eight ranks the original gave each rank one class."""
    path = tmp_path / "sorted.txt"
    path.write_text("".join(f"{i}.jpg {i // 400}\n" for i in range(4000)))
    world, mini_epochs = 8, 1 if options else 2
    p_values = []
    for rank in range(world):
        dataset = RankDataset(path, rank=rank, world_size=world, mini_epochs=mini_epochs, seed=1, **options)
        for mini_epoch in range(mini_epochs):
            dataset.set_mini_epoch(mini_epoch)
            counts = np.bincount([label for _, label, _ in dataset.__getitems__(range(len(dataset)))], minlength=10)
            assert counts.min() > 0
            statistic = ((counts - counts.mean()) ** 2).sum() / counts.mean()
            p_values.append(float(scipy.special.chdtrc(len(counts) - 1, statistic)))  # scipy.stats is much to import
    assert min(p_values) > 1e-4, p_values


def test_global_generators_are_left_alone(rows: Manifest) -> None:
    import random

    before = random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()
    dataset = RankDataset(rows, seed=3, load=draw_load)
    dataset.set_epoch(1)
    had_all = dataset.__getitems__(range(60))
    dataset.next_mini_epoch()
    assert len(had_all) == 60
    assert before == (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist())


def test_length_before_set_epoch_changes_nothing(rows: Manifest) -> None:
    asked, not_asked = (RankDataset(rows[:50], rank=0, world_size=3, mini_epochs=2, seed=1) for _ in range(2))
    assert len(asked) == 9
    for dataset in (asked, not_asked):
        dataset.set_epoch(2)
        dataset.set_mini_epoch(1)
    assert had(asked) == had(not_asked)


def test_load_draws_by_seed_epoch_and_position(rows: Manifest) -> None:
    whole = dict(RankDataset(rows, seed=3, load=draw_load).__getitems__(range(60)))
    parts: dict[int, float] = {}
    for rank in range(5):
        parts |= dict(RankDataset(rows, rank=rank, world_size=5, seed=3, load=draw_load).__getitems__(range(12)))
    assert parts == whole
    assert len(set(whole.values())) == 60
    other = RankDataset(rows, seed=3, load=draw_load)
    other.set_epoch(1)
    assert not set(dict(other.__getitems__(range(60))).values()) & set(whole.values())


def test_only_a_load_that_says_so_is_pure(rows: Manifest) -> None:
    assert RankDataset(rows).pure
    assert RankDataset(rows, load=draw_load).pure
    assert not RankDataset(rows, load=lambda record: record.row).pure


class TestPlace:
    def test_next_mini_epoch_goes_round(self, rows: Manifest) -> None:
        dataset = RankDataset(rows, mini_epochs=3)
        places = [(dataset.epoch, dataset.mini_epoch)]
        for _ in range(4):
            assert dataset.next_mini_epoch() == dataset.mini_epoch
            places.append((dataset.epoch, dataset.mini_epoch))
        assert places == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
        dataset.set_epoch(1)
        assert dataset.mini_epoch == 0

    @pytest.mark.parametrize("method", METHODS)
    def test_running_workers_of_torchs_loader_see_it(self, rows: Manifest, method: str) -> None:
        dataset = RankDataset(rows, rank=1, world_size=2, mini_epochs=2, seed=1)
        alone = RankDataset(rows, rank=1, world_size=2, mini_epochs=2, seed=1)
        loader = TorchDataLoader(
            dataset, 4, num_workers=1, persistent_workers=True, multiprocessing_context=method, collate_fn=list
        )
        for epoch in (0, 3):
            dataset.set_epoch(epoch)
            alone.set_epoch(epoch)
            for mini_epoch in range(2):
                dataset.set_mini_epoch(mini_epoch)
                alone.set_mini_epoch(mini_epoch)
                assert [item for batch in loader for item in batch] == alone.__getitems__(range(15))

    @pytest.mark.parametrize("copier", [copy.deepcopy, lambda dataset: pickle.loads(pickle.dumps(dataset))])
    def test_workers_of_a_copy_see_it_too(self, rows: Manifest, copier: Callable[[Any], Any]) -> None:
        original = RankDataset(rows, seed=1)
        original.set_epoch(2)
        dataset = copier(original)
        assert had(dataset) == had(original)
        loader = TorchDataLoader(dataset, 20, num_workers=1, persistent_workers=True, collate_fn=list)
        first = [item for batch in loader for item in batch]
        dataset.set_epoch(3)
        assert original.epoch == 2
        assert [item for batch in loader for item in batch] == dataset.__getitems__(range(60)) != first

    def test_threads_at_different_places(self, rows: Manifest) -> None:
        dataset = RankDataset(rows, seed=1)
        places = []
        expected = []
        for epoch in range(4):
            dataset.set_epoch(epoch)
            places.append(dataset.place)
            expected.append(had(dataset))
        wrong: list[int] = []

        def read(number: int) -> None:
            for _ in range(200):
                got = [row for _, _, row in dataset.load_samples(range(60), None, places[number])]
                if got != expected[number]:
                    wrong.append(number)

        threads = [threading.Thread(target=read, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


class TestBadInput:
    @pytest.mark.parametrize(
        ("options", "error", "words"),
        [
            ({"rank": 2, "world_size": 2}, PartitionError, "rank 2 is outside the world of 2"),
            ({"rank": -1, "world_size": 2}, PartitionError, "rank -1"),
            ({"rank": 0, "world_size": 0}, PartitionError, "world of 0"),
            ({"rank": 0, "world_size": -3}, PartitionError, "world of -3"),
            ({"rank": 0}, PartitionError, "both rank and world_size"),
            ({"world_size": 2}, PartitionError, "both rank and world_size"),
            ({"mini_epochs": 0}, PartitionError, "mini_epochs must be positive, got 0"),
            ({"mini_epochs": -2}, PartitionError, "mini_epochs must be positive, got -2"),
            ({"shuffle": "random"}, ConfigError, "'global'"),
            ({"remainder": "repeat"}, ConfigError, "'uneven'"),
            ({"group": 0}, ConfigError, "group=0"),
            ({"group": -1}, ConfigError, "group=-1"),
            ({"group": 2, "shuffle": "none"}, ConfigError, "shuffle='none'"),
            ({"group": 2, "window": 3}, ConfigError, "window"),
            ({"block_size": 3}, ConfigError, "shuffle='block'"),
            ({"preload": True}, ConfigError, "copy a manifest on a slow file system to a local disk"),
            ({"progress": True}, ConfigError, "give it to Manifest.open"),
            ({"shuffle": "block", "block_size": 0}, ConfigError, "positive"),
            ({"shuffle": "block", "window": -1}, ConfigError, "positive"),
            ({"seed": 1 << 64}, OrderError, "64-bit"),
            ({"seed": -(1 << 64)}, OrderError, "64-bit"),
        ],
        ids=str,
    )
    def test_options(self, rows: Manifest, options: dict[str, Any], error: type[Exception], words: str) -> None:
        with pytest.raises(error, match=words) as caught:
            RankDataset(rows, **options)
        assert isinstance(caught.value, PenstockError)
        assert isinstance(caught.value, ValueError)

    def test_places(self, rows: Manifest) -> None:
        dataset = RankDataset(rows, mini_epochs=3)
        with pytest.raises(ConfigError, match="epoch must be 0 or more, got -1"):
            dataset.set_epoch(-1)
        for outside in (3, -1):
            with pytest.raises(PartitionError, match=f"mini_epoch {outside} is outside the epoch's 3"):
                dataset.set_mini_epoch(outside)
        assert (dataset.epoch, dataset.mini_epoch) == (0, 0)

    def test_files(self, tmp_path: Path) -> None:
        (tmp_path / "binary.txt").write_bytes(b"\x00\x01\x02" * 100)
        (tmp_path / "labels.txt").write_text("a.jpg 1\nb.jpg many\n")
        for name in ("missing.txt", "", "binary.txt"):
            with pytest.raises(ManifestError, match=str(tmp_path / name)):
                RankDataset(tmp_path / name)[0]
        with pytest.raises(ManifestError, match=r"labels\.txt.*line 2.*b\.jpg many"):
            had(RankDataset(tmp_path / "labels.txt"))
