"""`Ledger`: what it says of each step is what a run that records it delivers, and its inverse finds every row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from packed_support import Documents, spans
from torch.utils.data import IterableDataset

from penstock import (
    DataLoader,
    DistributedSampler,
    Ledger,
    Manifest,
    Mixture,
    PackedDataset,
    RandomSampler,
    RankDataset,
    Subset,
    TokenBudgetBatchSampler,
    WeightedRandomSampler,
    generator,
)
from penstock.errors import ConfigError

LENGTHS = np.random.default_rng(0).integers(1, 40, 150).tolist()


class Keyed(torch.utils.data.Dataset[Any]):
    """The row, and the first draw of its generator."""

    pure = True

    def __init__(self, base: int, n: int) -> None:
        self.base, self.n = base, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, row: int) -> tuple[int, int]:
        return self.base + row, int(generator().integers(1 << 40))


def drawn(key: int) -> int:
    from penstock.random import sample_scope

    with sample_scope(key):
        return int(generator().integers(1 << 40))


def rank_dataset(rank: int, world: int, manifest: Manifest, **options: Any) -> DataLoader:
    return DataLoader(RankDataset(manifest, rank=rank, world_size=world, seed=3, **options), batch_size=4)


def sampler(rank: int, world: int, manifest: Manifest, shuffle: Any = "global") -> DataLoader:
    data = Keyed(0, 50)
    return DataLoader(data, batch_size=4, sampler=DistributedSampler(data, world, rank, shuffle=shuffle, seed=2))


def mixture(rank: int, world: int, manifest: Manifest) -> DataLoader:
    sources = [Keyed(0, 30), Subset(Keyed(1000, 40), range(0, 40, 2)), Keyed(2000, 5)]
    schedule = [(40, [1, 1, 1]), (200, [0, 1, 3])]
    pairs = list(zip(sources, (3, 2, 1), strict=True))
    return DataLoader(Mixture(pairs, stop=70, schedule=schedule, rank=rank, world_size=world, seed=5), batch_size=4)


def of_full_batches(rank: int, world: int, manifest: Manifest) -> DataLoader:
    data = RankDataset(manifest, rank=rank, world_size=world, seed=3, remainder="uneven", mini_epochs=3)
    return DataLoader(data, batch_size=2, drop_last=True)


def uneven_mixture(rank: int, world: int, manifest: Manifest) -> DataLoader:
    parts = [(Keyed(0, 5), 1), (Keyed(1000, 5), 1)]
    data = Mixture(parts, stop=7, rank=rank, world_size=world, seed=5, remainder="uneven")
    return DataLoader(data, batch_size=2)


CASES = {
    "rank": rank_dataset,
    "full batches": of_full_batches,
    "uneven mixture": uneven_mixture,
    "blocks": lambda *a: rank_dataset(*a, shuffle="block", block_size=7, window=2),
    "mini-epochs": lambda *a: rank_dataset(*a, mini_epochs=3),
    "uneven": lambda *a: rank_dataset(*a, remainder="uneven"),
    "sampler": sampler,
    "torch's order": lambda *a: sampler(*a, shuffle=True),
    "mixture": mixture,
}


@pytest.fixture
def manifest(tmp_path: Any) -> Manifest:
    (tmp_path / "train.txt").write_text("".join(f"{i:03}.jpg {i % 7}\n" for i in range(53)))
    return Manifest.open(tmp_path / "train.txt")


def rows_of(batch: Any, ledger_rows: Any) -> list[int]:
    rows = (batch[2] if len(batch) == 3 else batch[0]).tolist()
    return rows


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_it_says_what_a_run_delivers(name: str, world: int, manifest: Manifest) -> None:
    loaders = [CASES[name](rank, world, manifest) for rank in range(world)]
    ledger, step = Ledger(loaders[0]), 0
    assert ledger.world_size == world
    for epoch in range(3):
        parts = int(getattr(loaders[0].dataset, "mini_epochs", 1))
        for part in range(parts):
            for loader in loaders if not part else ():
                loader.set_epoch(epoch)
            ran = [list(loader) for loader in loaders]
            for number in range(max(map(len, ran))):
                for rank in range(world):
                    batch = ran[rank][number] if number < len(ran[rank]) else None
                    said = ledger.rows(step, rank=rank)
                    had = [] if batch is None else rows_of(batch, said)
                    base = np.where(said.sources > 0, said.sources * 1000, 0)
                    rows = np.where(said.sources == 1, said.rows * (1 if name != "mixture" else 2), said.rows)
                    assert (rows + base).tolist() == had
                    assert said.epoch == epoch
                    if batch is not None and len(batch) == 2 and said.keys is not None:
                        assert [drawn(key) for key in said.keys[:2].tolist()] == batch[1].tolist()[:2]
                    for row, source in list(zip(said.rows.tolist(), said.sources.tolist(), strict=True))[:2]:
                        found = ledger.steps(row, source=source, epoch=epoch)
                        assert (step, epoch, rank) in found
                step += 1
    whole = ledger.rows(1)
    assert whole.rows.tolist() == [row for rank in range(world) for row in ledger.rows(1, rank=rank).rows.tolist()]
    with pytest.raises(TypeError):
        ledger.rows(1, rank=0.5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="outside the world"):
        ledger.rows(1, rank=world)


@pytest.mark.parametrize("balance", [None, 2])
def test_documents_of_packs(balance: int | None) -> None:
    world = 2
    shares = [
        PackedDataset(Documents(LENGTHS), 64, rank=rank, world_size=world, seed=1, balance=balance)
        for rank in range(world)
    ]
    loaders = [DataLoader(share, batch_size=2) for share in shares]
    ledger = Ledger(loaders[0])
    for rank, loader in enumerate(loaders):
        for step, batch in enumerate(loader):
            had = [
                document
                for number in range(len(batch["labels"]))
                for document, _, _ in spans({name: values[number] for name, values in batch.items()})
            ]
            assert ledger.rows(step, rank=rank).rows.tolist() == had
            assert any(found[:1] == (step,) for found in ledger.steps(had[0], epoch=0))
    for row in (0, 7, 149):
        assert len(ledger.steps(row, epoch=1)) >= 1
        assert ledger.seen(row, until=3 * ledger.steps_per_epoch) >= 3


@pytest.mark.parametrize("remainder", ["pad", "drop", "uneven"])
@pytest.mark.parametrize("asked_on", [2, 1])
def test_packs_dealt_by_cost_in_mini_epochs(asked_on: int, remainder: str) -> None:
    def make(rank: int, world: int) -> DataLoader:
        options: dict[str, Any] = {"mini_epochs": 3, "balance": 3, "remainder": remainder, "exclude": [5, 9]}
        packs = PackedDataset(Documents(LENGTHS), 64, rank=rank, world_size=world, seed=1, **options)
        return DataLoader(packs, batch_size=3)

    loaders = [make(rank, 2) for rank in range(2)]
    ledger, step = Ledger(make(0, asked_on), world_size=2), 0
    had: dict[int, set[tuple[int, int]]] = {row: set() for row in range(len(LENGTHS))}
    for _ in range(3):
        ran = [list(loader) for loader in loaders]
        for number in range(max(map(len, ran))):
            for rank in range(2):
                rows = documents_of(ran[rank][number]) if number < len(ran[rank]) else []
                assert ledger.rows(step, rank=rank).rows.tolist() == rows
                for row in rows:
                    had[row].add((step, rank))
            step += 1
    assert step == ledger.steps_per_epoch
    for row, places in had.items():
        assert {(found.step, found.rank) for found in ledger.steps(row, epoch=0)} == places


def documents_of(batch: dict[str, Any]) -> list[int]:
    packs = [{name: values[i] for name, values in batch.items()} for i in range(len(batch["labels"]))]
    return [document for pack in packs for document, _, _ in spans(pack)]


def test_documents_of_a_mixture_of_packs() -> None:
    parts = [(Documents(LENGTHS), 2), (Documents([30] * 40, base=500), 1)]
    packed = PackedDataset(Mixture(parts, stop=200, rank=0, world_size=1, seed=4), 64)
    loader = DataLoader(packed, batch_size=3)
    ledger = Ledger(loader)
    for step, batch in enumerate(loader):
        had = [
            document
            for number in range(len(batch["labels"]))
            for document, _, _ in spans({name: values[number] for name, values in batch.items()})
        ]
        said = ledger.rows(step)
        assert (said.rows + said.sources * 500).tolist() == had
        row, source = int(said.rows[0]), int(said.sources[0])
        assert step in [found.step for found in ledger.steps(row, source=source, epoch=0)]


def test_weights_that_were_changed_are_in_the_state() -> None:
    made = Mixture([(Keyed(0, 300), 1), (Keyed(5000, 300), 1)], stop=20_000, rank=0, world_size=1)
    loader = DataLoader(made, batch_size=100)
    before = Ledger(loader).rows(150).sources.tolist()
    iterator = iter(loader)
    next(iterator)
    begin = made.set_weights([0, 1], at=8_000)
    ledger = Ledger(loader)
    assert set(ledger.rows(begin // 100 + 1).sources.tolist()) == {1} != set(before)


@pytest.mark.parametrize("world", [1, 3, 64])
def test_batches_by_tokens(world: int) -> None:
    def make(rank: int) -> DataLoader:
        batches = TokenBudgetBatchSampler(LENGTHS, 100, world_size=world, rank=rank, seed=2)
        return DataLoader(Keyed(0, 150), batch_sampler=batches)

    loaders = [make(rank) for rank in range(world)]
    ledger = Ledger(loaders[0])
    for rank, loader in enumerate(loaders):
        for step, batch in enumerate(loader):
            said = ledger.rows(step, rank=rank)
            assert said.rows.tolist() == batch[0].tolist()
            assert said.keys is not None
            assert [drawn(key) for key in said.keys.tolist()] == batch[1].tolist()
            assert (step, 0, rank) in ledger.steps(int(batch[0][0]), epoch=0)


def test_seen_counts_what_came_before() -> None:
    data = Keyed(0, 20)
    loader = DataLoader(data, batch_size=5, sampler=RandomSampler(data, shuffle="global", seed=1))
    ledger = Ledger(loader)
    (at,) = ledger.steps(13, epoch=1)
    assert (ledger.seen(13, until=at.step), ledger.seen(13, until=at.step + 1)) == (1, 2)


def test_large_jobs_are_asked_at_once() -> None:
    n, world = 10**9, 10_000
    loader = DataLoader(
        range(n), batch_size=8, sampler=DistributedSampler(range(n), world, 0, shuffle="global", seed=1)
    )
    ledger = Ledger(loader)
    row = int(ledger.rows(54_321, rank=777).rows[3])
    assert [(found.step, found.rank) for found in ledger.steps(row, epoch=54_321 // ledger.steps_per_epoch)] == [
        (54_321, 777)
    ]


class _Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (lambda: DataLoader(_Stream()), "known only by reading"),
        (lambda: DataLoader(range(9), shuffle=True), "without a seed"),
        (lambda: DataLoader(range(9), sampler=[1, 2]), "does not know the order of a"),
        (
            lambda: torch.utils.data.DataLoader(list(range(9))),
            r"Ledger takes a penstock\.DataLoader, got torch\.utils\.data",
        ),
    ],
)
def test_what_nobody_can_compute(loader: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Ledger(loader())


def test_sources_have_names() -> None:
    sources = [(Keyed(0, 30), 1), (Keyed(1000, 30), 1)]
    ledger = Ledger(DataLoader(Mixture(sources, names=["web", "code"], stop=40, rank=0, world_size=1), batch_size=4))
    assert ledger.steps(7, source="code") == ledger.steps(7, source=1) != []
    with pytest.raises(ConfigError, match="0 to 1 or one of web, code, got 'books'"):
        ledger.steps(7, source="books")
    data = Keyed(0, 20)
    plain = Ledger(DataLoader(data, batch_size=5, sampler=RandomSampler(data, shuffle="global", seed=1)))
    with pytest.raises(ConfigError, match="this dataset is none"):
        plain.steps(7, source=0)


def test_questions_that_make_no_sense() -> None:
    data = Keyed(0, 20)
    ledger = Ledger(DataLoader(data, batch_size=5, sampler=RandomSampler(data, shuffle="global", seed=1)))
    for question in (lambda: ledger.rows(-1), lambda: ledger.rows(0, rank=1)):
        with pytest.raises(ConfigError):
            question()
    assert ledger.steps(20) == []


def test_rows_that_are_drawn_more_than_once() -> None:
    data = Keyed(0, 20)
    ledger = Ledger(DataLoader(data, batch_size=5, sampler=WeightedRandomSampler([1.0] * 20, 60, seed=1)))
    every = [row for step in range(12) for row in ledger.rows(step).rows.tolist()]
    assert [len(ledger.steps(row, epoch=0)) for row in range(20)] == [every.count(row) for row in range(20)]


REPEATING = [7, 3, 3, 19, 0, 7, 3, *range(20, 29)]


def _repeating(manifest: Manifest, **options: Any) -> RankDataset:
    data = RankDataset(manifest, seed=3, rank=0, world_size=1, **options)
    return cast(RankDataset, Subset(data, REPEATING))


REPEATED: dict[str, Callable[[Manifest], Any]] = {
    "filter": _repeating,
    "filter of a filter": lambda manifest: Subset(_repeating(manifest), [1, 2, 2, 0, 5, 8, 9]),
    "excluded rows": lambda manifest: _repeating(manifest, exclude=[3, 20, 21, 40]),
    "mixture": lambda manifest: Mixture([(_repeating(manifest), 2), (Keyed(0, 9), 1)], stop=60, rank=0, world_size=1),
}


@pytest.mark.parametrize("name", REPEATED)
def test_rows_that_a_filter_repeats(name: str, manifest: Manifest) -> None:
    ledger = Ledger(DataLoader(REPEATED[name](manifest), batch_size=3))
    had: dict[tuple[int, int], list[int]] = {}
    for step in range(ledger.steps_per_epoch):
        said = ledger.rows(step)
        for row, source in zip(said.rows.tolist(), said.sources.tolist(), strict=True):
            had.setdefault((row, source), []).append(step)
    assert max(map(len, had.values())) > 1
    for (row, source), steps in had.items():
        assert [found.step for found in ledger.steps(row, source=source, epoch=0)] == steps
        assert ledger.seen(row, source=source, until=ledger.steps_per_epoch) == len(steps)


def test_batches_that_are_passed_over() -> None:
    whole = [batch.tolist() for batch in DataLoader(range(100), batch_size=7, shuffle="global", seed=1)]
    loader = DataLoader(range(100), batch_size=7, shuffle="global", seed=1)
    iterator = iter(loader)
    assert [next(iterator).tolist() for _ in range(3)] == whole[:3]
    loader.skip(4)
    state = loader.state_dict()
    assert [batch.tolist() for batch in loader] == whole[7:]
    again = DataLoader(range(100), batch_size=7, shuffle="global", seed=1)
    again.load_state_dict(state)
    again.skip(1)
    assert [batch.tolist() for batch in again] == whole[8:]
    with pytest.raises(ConfigError, match="epoch 1 has 15 batches left: skip takes 0 to 15, got 16"):
        again.skip(16)
    with pytest.raises(ConfigError, match="stream"):
        DataLoader(_Stream()).skip(1)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("mini_epochs", [1, 3])
def test_where_steps_begin(mini_epochs: int, drop_last: bool) -> None:
    data = Mixture([(range(50), 1)], stop=101, mini_epochs=mini_epochs, remainder="drop", rank=0, world_size=2)
    ledger = Ledger(DataLoader(data, batch_size=5, drop_last=drop_last))
    steps = [ledger.rows(step) for step in range(2 * ledger.steps_per_epoch)]
    for step, found in enumerate(steps):
        assert ledger.begin(step) == (found.epoch, found.positions.min())
    for epoch in range(2):
        for position in range(101):
            later = [
                step for step, found in enumerate(steps) if (found.epoch, found.positions.max()) >= (epoch, position)
            ]
            assert ledger.step_from(position, epoch=epoch) == min(later, default=len(steps))
