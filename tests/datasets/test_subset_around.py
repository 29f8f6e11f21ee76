"""Filters of what holds data sets of ours: their rows are those of the source, whatever the order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from mixture_support import Numbers
from packed_support import Documents, tokens_of
from torch.utils.data import ConcatDataset

from penstock import Manifest, Mixture, PackedDataset, RankDataset, Subset, TableDataset, TokenizedDataset
from penstock.errors import ConfigError, StateError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def ids(text: str) -> list[int]:
    return [int(text)] * (int(text) % 3 + 1)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    pq.write_table(pa.table({"text": [str(row) for row in range(40)], "n": range(40)}), tmp_path / "a.parquet")
    return tmp_path / "a.parquet"


def texts(table: Path, **options: Any) -> TokenizedDataset:
    return TokenizedDataset(TableDataset(table, rank=0, world_size=1, **options), ids, column="text")


@pytest.mark.parametrize("epoch", [0, 3])
def test_text_that_is_tokenized(table: Path, epoch: int) -> None:
    for keep in (np.arange(40) < 7, pc.field("n") < 7):
        kept = Subset(texts(table), keep)
        assert isinstance(kept, TokenizedDataset)
        kept.set_epoch(epoch)
        assert sorted(int(item[0]) for item in kept) == list(range(7))


def test_packs_of_text_have_the_lengths_of_their_rows(table: Path) -> None:
    lengths = [row % 3 + 1 for row in range(40)]
    source = texts(table)
    source.set_epoch(2)
    packs = PackedDataset(source, 8, lengths=lengths, rank=0, world_size=1)
    assert tokens_of(list(packs)) == sorted(row for row in range(40) for _ in range(lengths[row]))


def test_long_lists_are_different_filters(tmp_path: Path) -> None:
    """pyarrow's text of an expression leaves out the middle of a list."""
    n = 600_000
    pq.write_table(pa.table({"n": np.arange(n)}), tmp_path / "a.parquet", row_group_size=n)
    whole = TableDataset(tmp_path / "a.parquet", rank=0, world_size=1)
    even = np.arange(0, n, 2)
    other = even.copy()
    other[50:-50] += 1
    found = [Subset(whole, pc.field("n").isin(pa.array(rows))) for rows in (even, other)]
    assert found[0].fingerprint != found[1].fingerprint


def test_a_mixture_reads_rows_whatever_its_sources_show(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"{i}.jpg {i}\n" for i in range(40)))
    source = RankDataset(Manifest.open(tmp_path / "a.txt"), rank=0, world_size=1, mini_epochs=2, seed=3)
    mixture = Mixture([(source, 1)], rank=0, world_size=1, mode="repeat")
    before = [item[2] for item in mixture]
    source.set_epoch(5)
    assert [item[2] for item in mixture] == before
    assert sorted(before) == list(range(40))


def test_a_filter_of_a_packed_mixture_is_over_documents() -> None:
    parts = [(Documents([5, 9, 3] * 10), 1), (Documents([4, 2, 8] * 10, base=100), 1)]
    packs = PackedDataset(Mixture(parts, mode="repeat", rank=0, world_size=1), 16)
    every = tokens_of(list(packs))
    assert tokens_of(list(Subset(packs, np.ones(60, np.bool_)))) == every
    kept = Subset(packs, np.arange(60) % 30 < 10)
    assert tokens_of(list(kept)) == [token for token in every if token // 1000 % 100 < 10]


def test_a_permutation_of_the_documents_of_packs() -> None:
    rows = np.random.default_rng(0).permutation(30)
    packs = PackedDataset(Documents(np.arange(1, 31)), 40, lengths=np.arange(1, 31), rank=0, world_size=1)
    assert tokens_of(list(Subset(packs, rows))) == tokens_of(list(packs))


def test_what_is_dealt_by_cost_goes_on_between_windows_alone() -> None:
    def make(rank: int, world: int, balance: int | None = 4) -> PackedDataset:
        documents = Documents(np.random.default_rng(0).integers(1, 40, 400))
        return PackedDataset(documents, 64, rank=rank, world_size=world, balance=balance)

    inside, between = (json.loads(json.dumps(make(0, 2).state_dict(count))) for count in (7, 8))
    make(1, 2).load_state_dict(inside)
    make(0, 3).load_state_dict(between)
    with pytest.raises(StateError, match="middle of 8 packs that were assigned to 2 ranks"):
        make(0, 3).load_state_dict(inside)
    with pytest.raises(StateError, match="balance"):
        make(0, 2, None).load_state_dict(between)


def test_weights_are_those_of_each_reader() -> None:
    from penstock import DataLoader

    made = Mixture([(Numbers(0, 300), 1), (Numbers(5000, 300), 1)], stop=20_000, rank=0, world_size=1)
    first, second = DataLoader(made, batch_size=100), DataLoader(made, batch_size=100)
    state = second.state_dict()
    iterator = iter(first)
    next(iterator)
    made.set_weights([0, 1], at=8_000)
    had = [next(iterator) for _ in range(2)]
    second.load_state_dict(state)
    assert len(had) == 2
    rest = list(iterator)
    assert set((rest[-1] >= 5000).tolist()) == {True}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Mixture([(Numbers(0, 9), 1), ([], 0)], schedule=[(4, [1, 1])], stop=9), "source 1 is empty"),
        (lambda: Mixture([(Numbers(0, 9), 1), ([], 0)], stop=9).set_weights([1, 1], at=0), "source 1 is empty"),
        (lambda: Mixture([(Numbers(0, 9), 1)], stop=9).set_weights(5, at=0), "each of the 1 sources"),
        (lambda: Mixture([(Numbers(0, 9), 1)], stop=9).set_weights([1], at=-5), "integer of 0 or more"),
        (lambda: Mixture([(Numbers(0, 9), 1)], stop=9).set_weights([1], at=1.5), "integer of 0 or more"),
        (lambda: Mixture([(Numbers(0, 9), 1)], stop=9, schedule=5), "list of pairs"),
        (lambda: Subset(range(5), np.array([1, 0, 1, 1, 0], np.uint8)), "astype"),
        (lambda: PackedDataset([[1.5, 2.5]], 4, lengths=[2], rank=0, world_size=1)[0], "tokens must be integers"),
        (lambda: PackedDataset([{"ids": [1]}], 4, lengths=[1], rank=0, world_size=1)[0], "without input_ids"),
        (lambda: PackedDataset([[1]], True, lengths=[1]), "capacity"),
    ],
)
def test_what_makes_no_sense(call: Any, message: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=message):
        call()


def test_data_sets_of_torch_s_around_ours_have_no_rows(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"{i}.jpg {i}\n" for i in range(9)))
    part = RankDataset(Manifest.open(tmp_path / "a.txt"), rank=0, world_size=1)
    with pytest.raises(ConfigError, match=r"Subset\(inner, keep\)"):
        Subset(ConcatDataset([part, part]), [1, 2])
