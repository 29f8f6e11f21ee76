"""`Subset`: the kept rows once an epoch, over every kind of data set, as torch's where there is no order."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loader_conformance import check_chain, check_elastic, check_resume
from loader_support import plain
from mixture_support import Drawing, Numbers
from torch.utils.data import IterableDataset
from torch.utils.data import Subset as TorchSubset

from penstock import DataLoader, Manifest, PackedDataset, RankDataset, Subset, TableDataset
from penstock.errors import ConfigError, StateError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    (tmp_path / "train.txt").write_text("".join(f"{i:03}.jpg {i % 7}\n" for i in range(100)))
    return Manifest.open(tmp_path / "train.txt")


def rows(dataset: Any) -> list[int]:
    return [item[2] for item in dataset.__getitems__(range(len(dataset)))]


# Over data without an order of their own.


@pytest.mark.parametrize("keep", [[3, -1, 3, 0], np.arange(10) % 2 == 0, torch.tensor([5, 1]), []])
def test_as_torch_s_subset(keep: Any) -> None:
    data = list("abcdefghij")
    mine = Subset(data, keep)
    kept = np.flatnonzero(keep) if getattr(keep, "dtype", None) == np.bool_ else keep
    theirs = TorchSubset(data, [int(i) for i in kept])
    assert [mine[i] for i in range(len(mine))] == [theirs[i] for i in range(len(theirs))]
    assert isinstance(mine, TorchSubset)
    assert mine.__getitems__(list(range(len(mine)))) == list(mine) == [mine[i - len(mine)] for i in range(len(mine))]


def test_a_mask_in_a_file(tmp_path: Path) -> None:
    np.save(tmp_path / "mask.npy", np.arange(10) > 6)
    assert list(Subset(range(10), tmp_path / "mask.npy")) == [7, 8, 9]


def test_filters_of_filters() -> None:
    odd = Subset(Numbers(0, 40), np.arange(40) % 2 == 1)
    twice = Subset(odd, [1, 3, 5])
    assert list(twice) == [3, 7, 11]
    assert len({odd.fingerprint, twice.fingerprint, Numbers(0, 40).fingerprint}) == 3


@pytest.mark.parametrize("executor", ["thread", "process"])
def test_every_executor_gives_the_same(executor: str) -> None:
    data = Subset(Drawing(0, 60), np.arange(60) % 3 > 0)
    expected = [plain(batch) for batch in DataLoader(data, batch_size=7, shuffle="global", seed=5)]
    loader = DataLoader(data, batch_size=7, shuffle="global", seed=5, num_workers=2, executor=executor)
    assert [plain(batch) for batch in loader] == expected


# Over data with an order of their own.


@given(data=st.data())
@settings(max_examples=30)
def test_every_kept_row_once_an_epoch_on_all_ranks(data: Any) -> None:
    manifest = _manifest()
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=40, max_size=40)))
    world, shuffle = data.draw(st.integers(1, 5)), data.draw(st.sampled_from(["global", "block", "none"]))
    had: list[int] = []
    for rank in range(world):
        whole = RankDataset(manifest, rank=rank, world_size=world, shuffle=shuffle, remainder="uneven", seed=2)
        kept = Subset(whole, mask)
        kept.set_epoch(3)
        assert isinstance(kept, RankDataset)
        had += rows(kept)
    assert sorted(had) == np.flatnonzero(mask).tolist()


def _manifest() -> Manifest:
    import tempfile

    path = Path(tempfile.gettempdir()) / "penstock-test-subset.txt"
    if not path.exists():
        path.write_text("".join(f"{i:03}.jpg {i % 7}\n" for i in range(40)))
    return Manifest.open(path)


def test_an_expression_over_a_manifest(manifest: Manifest) -> None:
    kept = Subset(RankDataset(manifest, rank=0, world_size=1), pc.field("label") == 3)
    assert sorted(rows(kept)) == list(range(3, 100, 7))
    again = Subset(kept, pc.field("path") > "050")  # of what the first one keeps
    assert sorted(rows(again)) == list(range(52, 100, 7))
    assert len({kept.fingerprint, again.fingerprint, manifest.fingerprint}) == 3
    plain = Subset(Subset(manifest, pc.field("label") == 3), [0, 1])
    assert [record.row for record in plain] == [3, 10]


def test_an_expression_reads_the_columns_that_it_names(tmp_path: Path) -> None:
    table = pa.table({"n": range(1000), "text": ["x" * (i % 5) for i in range(1000)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=100)
    kept = Subset(
        TableDataset(tmp_path / "a.parquet", rank=0, world_size=1), (pc.field("n") > 994) | (pc.field("n") < 2)
    )
    assert sorted(item["n"] for item in kept.__getitems__(range(len(kept)))) == [0, 1, *range(995, 1000)]
    batch = next(iter(DataLoader(kept, batch_size=4)))
    assert set(batch["n"].tolist()) <= {0, 1, *range(995, 1000)}


def test_resume_at_every_position_and_on_other_ranks(manifest: Manifest) -> None:
    mask = np.arange(100) % 3 != 1

    def make(rank: int = 0, world: int = 1) -> RankDataset:
        return Subset(RankDataset(manifest, rank=rank, world_size=world, seed=4), mask)

    check_resume(lambda: DataLoader(make(), batch_size=8), passes=2)
    check_chain(lambda: DataLoader(make(), batch_size=8), [1, 5, 2])
    ordinals = {row: ordinal for ordinal, row in enumerate(np.flatnonzero(mask).tolist())}
    check_elastic(
        lambda rank, world: DataLoader(make(rank, world), batch_size=8),
        lambda batch: [ordinals[row] for row in batch[2].tolist()],
        67,
        [(2, 2), (3, 1), (1, 0)],
    )


def test_a_state_of_other_rows_is_refused(manifest: Manifest) -> None:
    whole = RankDataset(manifest, rank=0, world_size=1)
    state = Subset(whole, np.arange(100) < 50).state_dict(10)
    Subset(whole, np.arange(50)).load_state_dict(state)
    with pytest.raises(StateError, match="fingerprint"):
        Subset(whole, np.arange(1, 51)).load_state_dict(state)
    with pytest.raises(StateError, match="fingerprint"):
        whole.load_state_dict(state)


def test_the_data_set_itself_stays_as_it_is(manifest: Manifest) -> None:
    whole = RankDataset(manifest, rank=0, world_size=1)
    before = rows(whole)
    kept = Subset(whole, np.arange(100) < 50)
    assert sorted(rows(kept)) == list(range(50))
    assert rows(whole) == before
    assert rows(pickle.loads(pickle.dumps(kept))) == rows(kept)


# Errors.


class _Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize(
    ("data", "keep", "message"),
    [
        (range(5), [True, False], "mask of 2 values for a dataset of 5 rows"),
        (range(5), "abc", "not an .npy file"),
        (range(5), "label == 1", r"An expression is an object such as pyarrow\.compute\.field"),
        (range(5), [0.5], "keep takes a mask"),
        (range(5), {"a": 1}, "keep takes a mask"),
        (range(5), pc.field("label") > 1, "this data has no columns"),
        (_Stream(), [1], "got a _Stream: filter a stream"),
    ],
)
def test_what_makes_no_sense(data: Any, keep: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Subset(data, keep)


@pytest.mark.parametrize("renamed", [False, True], ids=["in place", "renamed, with the old time"])
def test_a_table_that_is_written_again(tmp_path: Path, renamed: bool) -> None:
    path, scores = tmp_path / "scores.arrow", np.ones(600_000, np.uint8)

    def write() -> None:
        table = pa.table({"score": scores})
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)

    def counts() -> tuple[int, int]:
        table = TableDataset(path, rank=0, world_size=1)
        kept = Subset(table, pc.field("score") > 0)
        return len(kept), len(PackedDataset(table, 1, lengths="score", rank=0, world_size=1))

    write()
    before = TableDataset(path).fingerprint
    assert counts() == (600_000, 600_000)
    old = path.stat()
    if renamed:
        path.rename(tmp_path / "old.arrow")
    scores[200_000:200_300] = 0
    write()
    if renamed:
        os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns))
    assert path.stat().st_size == old.st_size
    assert TableDataset(path).fingerprint == before, "a fingerprint of a large file samples it"
    assert counts() == (599_700, 599_700)


def test_an_expression_over_columns_that_are_not_there(manifest: Manifest) -> None:
    with pytest.raises(ConfigError, match=r"score.*The columns are: path .*, label"):
        Subset(manifest, pc.field("score") > 1)
    with pytest.raises(ConfigError, match="label"):
        Subset(manifest, pc.field("label") > "x")


def test_keys_of_json_lines_are_no_columns(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"n": 1}\n{"n": 2}\n')
    lines = TableDataset(tmp_path / "a.jsonl", rank=0, world_size=1)
    with pytest.raises(ConfigError, match=r"JSON lines do not.*Give a mask or an array of rows"):
        Subset(lines, pc.field("n") > 1)
    assert len(Subset(lines, [False, True])) == 1


def test_a_filter_of_a_manifest_is_no_manifest(manifest: Manifest) -> None:
    with pytest.raises(ConfigError, match=r"got a dataset \(Subset\).*Subset\(RankDataset\(manifest\), keep\)"):
        RankDataset(Subset(manifest, [0]))  # type: ignore[arg-type]
    assert len(Subset(RankDataset(manifest, rank=0, world_size=1), [0])) == 1


def test_a_slice_is_no_index() -> None:
    packs = PackedDataset([[1, 2], [3]], 4, lengths=[2, 1], rank=0, world_size=1)
    for dataset in (Subset(list("abc"), [0, 2]), packs):
        with pytest.raises(TypeError, match=r"got slice\(0, 1, None\).*__getitems__ of a dataset takes a list"):
            dataset[0:1]
        assert len(dataset.__getitems__(range(1))) == 1


def test_a_row_outside(manifest: Manifest) -> None:
    with pytest.raises(IndexError, match="index 100 is out of range"):
        Subset(manifest, [0, 100])
    with pytest.raises(IndexError):
        Subset(range(5), [1, 2])[2]


def test_an_empty_filter_has_no_batches(manifest: Manifest) -> None:
    kept = Subset(RankDataset(manifest, rank=0, world_size=1), pc.field("label") > 100)
    assert len(kept) == 0
    assert list(DataLoader(kept, batch_size=4)) == []
