"""Every sample exactly once: all numbers of shards, ranks and workers; epochs of exactly so many."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from interpreter_support import METHODS
from pairwise import each_value, pairwise
from wds_support import classes, worker, world, write_shards

import penstock
import penstock.wds as wds


def dataset_of(urls: str, **kw: object) -> wds.WebDataset:
    return wds.WebDataset(urls, shardshuffle=True, nodesplitter=wds.split_by_node, empty_check=False, **kw)  # type: ignore[arg-type]


@pytest.mark.parametrize(("shards", "ranks", "workers"), pairwise([1, 3, 8], [1, 2, 3], [0, 1, 4]))
def test_every_sample_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: int, ranks: int, workers: int
) -> None:
    urls = write_shards(tmp_path, shards)
    for _ in range(2):
        found: Counter[int] = Counter()
        for rank in range(ranks):
            with world(monkeypatch, rank, ranks):
                dataset = dataset_of(urls).shuffle(5).decode().to_tuple("cls")
                for number in range(max(1, workers)):
                    with worker(monkeypatch, number, max(1, workers)):
                        found.update(classes(dataset))
        assert found == dict.fromkeys(range(shards * 10), 1)


@pytest.mark.parametrize(("workers", "loader"), each_value([0, 1, 4], ["wds", "penstock", "torch"]))
def test_every_sample_once_in_loaders(tmp_path: Path, workers: int, loader: str) -> None:
    urls = write_shards(tmp_path, 8)
    dataset = dataset_of(urls).shuffle(5).decode().to_tuple("txt", "cls").batched(4)
    make = {"wds": wds.WebLoader, "penstock": penstock.DataLoader, "torch": torch.utils.data.DataLoader}[loader]
    batches = make(dataset, batch_size=None, num_workers=workers)
    first, second = classes(batches), classes(batches)
    assert sorted(first) == sorted(second) == list(range(80))
    assert first != second, "shards are in another order every epoch"


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("loader", ["penstock", "torch"])
def test_the_order_changes_and_repeats_from_seed_and_epoch(tmp_path: Path, persistent: bool, loader: str) -> None:
    urls = write_shards(tmp_path, 8)
    make = {"penstock": penstock.DataLoader, "torch": torch.utils.data.DataLoader}[loader]

    def epochs(count: int) -> list[list[int]]:
        dataset = dataset_of(urls).decode().to_tuple("cls")
        batches = make(dataset, batch_size=4, num_workers=2, persistent_workers=persistent, collate_fn=list)
        return [classes([x for b in batches for x in b]) for _ in range(count)]

    first = epochs(3)
    assert len({tuple(epoch) for epoch in first}) == 3
    assert epochs(3) == first


def test_a_rank_reads_other_shards_every_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    urls = write_shards(tmp_path, 8)
    with world(monkeypatch, 0, 2):
        dataset = dataset_of(urls)
        read = [{s["__url__"] for s in dataset} for _ in range(6)]
    assert len({frozenset(r) for r in read}) > 3
    assert all(len(r) == 4 for r in read)


def test_set_epoch_gives_that_epoch_again(tmp_path: Path) -> None:
    dataset = dataset_of(write_shards(tmp_path, 8)).shuffle(20)
    epochs = [classes(dataset) for _ in range(3)]
    dataset.set_epoch(1)
    assert classes(dataset) == epochs[1]
    assert dataset.epoch == 2
    assert classes(dataset) == epochs[2]
    assert classes(dataset_of(write_shards(tmp_path, 8), seed=5).shuffle(20)) != epochs[0]


def test_set_epoch_reaches_workers(tmp_path: Path) -> None:
    dataset = dataset_of(write_shards(tmp_path, 8)).decode().to_tuple("cls")
    loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=2, persistent_workers=True)
    first = classes(loader)
    assert classes(loader) != first
    dataset.set_epoch(0)
    assert classes(loader) == first


def test_a_look_at_the_data_changes_nothing_for_workers(tmp_path: Path) -> None:
    urls = write_shards(tmp_path, 8)

    def epoch(*, look: bool) -> list[int]:
        dataset = dataset_of(urls).decode().to_tuple("cls")
        if look:
            next(iter(dataset))
            next(iter(torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=1)))
        return classes(torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=2))

    assert epoch(look=True) == epoch(look=False)
    assert sorted(epoch(look=True)) == list(range(80))


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_epochs_of_a_loader_are_exact_and_go_on(tmp_path: Path, workers: int) -> None:
    dataset = dataset_of(write_shards(tmp_path, 8)).decode().to_tuple("cls").batched(5)
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=workers).with_epoch(7)
    epochs = [list(loader) for _ in range(4)]
    assert [len(epoch) for epoch in epochs] == [7] * 4
    counts = Counter(classes([batch for epoch in epochs for batch in epoch][:16]))
    assert counts == dict.fromkeys(range(80), 1), "the first pass is whole, over the borders of epochs"


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_with_epoch_of_a_data_set(tmp_path: Path, workers: int) -> None:
    urls = write_shards(tmp_path, 8)
    each = max(1, workers)
    loader = penstock.DataLoader(dataset_of(urls).with_epoch(50), batch_size=None, num_workers=workers)
    assert [len(list(loader)) for _ in range(2)] == [50 * each] * 2
    loader = penstock.DataLoader(dataset_of(urls).with_epoch(50, per="rank"), batch_size=None, num_workers=workers)
    assert [len(list(loader)) for _ in range(2)] == [50] * 2
    with pytest.raises(ValueError, match="positive number"):
        dataset_of(urls).with_epoch(0)


def test_several_ranks_need_a_splitter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    urls = write_shards(tmp_path, 4)
    with (
        world(monkeypatch, 1, 2),
        pytest.raises(ValueError, match="you need to add an explicit nodesplitter to your input pipeline"),
    ):
        list(wds.WebDataset(urls))


def test_a_worker_without_shards_is_an_error_unless_it_is_not(tmp_path: Path) -> None:
    urls = write_shards(tmp_path, 3)
    with pytest.raises(ValueError, match="empty_check=False"):
        list(penstock.DataLoader(wds.WebDataset(urls), batch_size=None, num_workers=4))
    loader = penstock.DataLoader(wds.WebDataset(urls, empty_check=False), batch_size=None, num_workers=4)
    assert len(list(loader)) == 30


def test_epochs_of_workers_without_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = wds.WebDataset(write_shards(tmp_path, 1), empty_check=False)
    with worker(monkeypatch, 1, 2):
        assert list(dataset.compose().with_epoch(5)) == list(dataset.compose().repeat()) == []
        with pytest.raises(ValueError, match="yields no samples"):
            list(dataset.compose().with_epoch(5, per="rank"))
    with world(monkeypatch, 1, 2), pytest.raises(ValueError, match="yields no samples"):
        list(dataset_of(write_shards(tmp_path, 1)).with_epoch(5))


def test_a_shuffle_of_shards_before_they_are_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    urls = write_shards(tmp_path, 8)
    found: Counter[int] = Counter()
    orders = []
    for rank in range(2):
        with world(monkeypatch, rank, 2):
            pipeline = wds.DataPipeline(
                wds.SimpleShardList(urls),
                wds.shuffle(100),
                wds.split_by_node,
                wds.split_by_worker,
                wds.tarfile_to_samples(),
                wds.shuffle(1000),
            )
            for number in range(2):
                with worker(monkeypatch, number, 2):
                    orders.append(classes(pipeline))
                    found.update(orders[-1])
    assert found == dict.fromkeys(range(80), 1)
    assert len({tuple(x % 10 for x in order) for order in orders}) == 4, "samples are shuffled differently"


def test_resampled_is_endless_and_differs_between_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    urls = write_shards(tmp_path, 8)
    shards = []
    for number in range(2):
        with world(monkeypatch, number, 2), worker(monkeypatch, number, 2):
            dataset = wds.WebDataset(urls, resampled=True).with_epoch(400)
            shards.append([s["__url__"] for s in dataset])
    assert shards[0] != shards[1]
    assert all(len(s) == 400 for s in shards)
    assert all(len(set(s)) >= 6 for s in shards)


def test_resampled_keeps_a_splitter_of_the_program_s_own(tmp_path: Path) -> None:
    urls = write_shards(tmp_path, 8)
    dataset = wds.WebDataset(
        urls, resampled=True, nodesplitter=lambda src: (s for s in src if "003" in s["url"]), workersplitter=None
    )
    assert {s["__url__"] for s in dataset.with_epoch(30)} == {str(tmp_path / "003.tar")}


def test_the_seed_of_a_list_can_be_set_later_and_a_shuffle_knows_its_epoch() -> None:
    pipeline = wds.DataPipeline(wds.SimpleShardList("{00..99}"), wds.slice(100))
    before = list(pipeline)
    pipeline.stage(0).seed = 17
    assert before != list(pipeline)
    pipeline = wds.DataPipeline(wds.SimpleShardList("{00..99}"), wds.detshuffle(10))
    for epoch in range(2):
        list(pipeline)
        assert pipeline.stage(1).epoch == epoch


@pytest.mark.parametrize("method", METHODS)
def test_every_start_method(tmp_path: Path, method: str) -> None:
    dataset = dataset_of(write_shards(tmp_path, 4)).shuffle(5).decode().to_tuple("txt", "cls")
    workers = 1 if method == "spawn" else 2  # each one imports torch
    loader = penstock.DataLoader(dataset, batch_size=8, num_workers=workers, multiprocessing_context=method)
    assert sorted(int(c) for _, b in loader for c in b) == list(range(40))
