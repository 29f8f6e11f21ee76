"""`PackedDataset(order="block")`: each token once, packs of one block of documents, blocks in runs."""

from __future__ import annotations

import itertools
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from full_run import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from loader_support import plain
from packed_support import Documents, tokens_of

from penstock import DataLoader, PackedDataset
from penstock.errors import ConfigError, DataFileIOError, StateError


def make(lengths: Any, rank: int = 0, world: int = 1, capacity: int = 16, **options: Any) -> PackedDataset:
    own = {"seed": 3, "order": "block", "block_size": 8, **options}
    return PackedDataset(Documents(lengths), capacity, rank=rank, world_size=world, **own)


def every_token(lengths: Any) -> list[int]:
    return [row * 1000 + i for row, length in enumerate(lengths) for i in range(length)]


LENGTHS = np.random.default_rng(5).integers(0, 30, 90)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=40).filter(any),
    st.integers(2, 24),
    st.integers(1, 12),
    st.integers(1, 4),
    st.integers(0, 3),
)
@settings(max_examples=examples(25, 200), deadline=None)
def test_every_token_once_an_epoch_on_all_ranks(
    lengths: list[int], capacity: int, block_size: int, world: int, epoch: int
) -> None:
    had = []
    for rank in range(world):
        packs = make(lengths, rank, world, capacity, block_size=block_size, remainder="uneven")
        packs.set_epoch(epoch)
        had += list(packs)
    assert tokens_of(had) == every_token(lengths)


def test_a_pack_has_documents_of_one_block_and_blocks_come_in_runs() -> None:
    packs = make(LENGTHS)
    orders = []
    for epoch in range(3):
        packs.set_epoch(epoch)
        found = packs.documents(packs.rows(range(len(packs))))
        blocks = [set((found.rows[a:b] // 8).tolist()) for a, b in itertools.pairwise(found.splits.tolist())]
        assert {len(block) for block in blocks} == {1}
        orders.append([number for (number,), _ in itertools.groupby(blocks)])
        assert sorted(orders[-1]) == list(range(12))
    assert len({tuple(order) for order in orders}) == 3


def test_each_epoch_deals_the_documents_of_a_block_anew() -> None:
    lengths = np.random.default_rng(0).integers(1, 60, 800)
    packs = make(lengths, capacity=128, block_size=400)
    first, second = (
        {tuple(packs.documents([number], epoch).rows.tolist()) for number in range(packs.packs)} for epoch in (0, 1)
    )
    assert len(first & second) < packs.packs // 4
    assert packs.fill > 0.98


@given(st.integers(0, len(LENGTHS) - 1), st.integers(0, 3))
@settings(max_examples=examples(15, 100), deadline=None)
def test_the_packs_of_a_document_are_found(row: int, epoch: int) -> None:
    packs = make(LENGTHS)
    where = packs.packs_of(row, epoch)
    found = packs.documents(where, epoch)
    mine = found.rows == row
    assert found.lengths[mine].sum() == LENGTHS[row]
    assert (np.diff(found.begins[mine]) > 0).all()
    assert mine.sum() == len(where)


def test_packs_that_are_asked_for_together_are_those_one_by_one() -> None:
    packs = make(LENGTHS)
    some = np.random.default_rng(1).permutation(packs.packs)[:9]
    together = packs.documents(some, 1)
    for number, (a, b) in zip(some.tolist(), itertools.pairwise(together.splits.tolist()), strict=True):
        alone = packs.documents([number], 1)
        assert [part[a:b].tolist() for part in together[:3]] == [part.tolist() for part in alone[:3]]
    assert packs.costs(some).tolist() == [int(packs.costs([number])[0]) for number in some.tolist()]
    assert len(packs.documents([], 1).rows) == 0


@pytest.mark.parametrize("stages", [[(2, 3), (3, 2), (1, None)], [(4, 1), (1, 5), (2, None)]], ids=str)
def test_every_token_once_over_changing_ranks(stages: list[Any]) -> None:
    state, had = None, []
    for world, count in stages:
        loaders = [
            DataLoader(make(LENGTHS, rank, world, 32, block_size=30, balance=2), batch_size=2) for rank in range(world)
        ]
        for one in loaders:
            if state is not None:
                one.load_state_dict(state)
        for iterator in map(iter, loaders):
            for batch in itertools.islice(iterator, count):
                had += [{name: values[i] for name, values in batch.items()} for i in range(len(batch["labels"]))]
        state = None if count is None else json.loads(json.dumps(loaders[0].state_dict()))
    assert sorted(set(tokens_of(had))) == every_token(LENGTHS)


def test_a_copy_goes_on_where_the_original_was() -> None:
    packs = make(LENGTHS)
    copy = pickle.loads(pickle.dumps(packs))
    copy.load_state_dict(json.loads(json.dumps(packs.state_dict(5))))
    assert [plain(pack) for pack in copy] == [plain(packs[i]) for i in range(5, len(packs))]


def test_types_of_packs_are_found_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packs = make(LENGTHS)
    expected = [plain(pack) for pack in packs]
    copied = pickle.dumps(packs)
    monkeypatch.setattr("penstock.order.packing.pack_types", None)
    assert [plain(pack) for pack in make(LENGTHS)] == expected
    assert [plain(pack) for pack in pickle.loads(copied)] == expected
    assert len(copied) < 20_000
    with pytest.raises(TypeError):  # of other blocks they must be found
        make(LENGTHS, block_size=9)


@pytest.mark.parametrize("damage", ["empty", "half", "longer", "magic", "table", "garbage"])
def test_a_damaged_file_of_types_is_made_again(cache: Path, damage: str) -> None:
    expected = [plain(pack) for pack in make(LENGTHS)]
    (kept,) = (cache / "penstock" / "packs").iterdir()
    whole = kept.read_bytes()
    damaged = {
        "empty": b"",
        "half": whole[: len(whole) // 2],
        "longer": whole + bytes(2),
        "magic": b"x" + whole[1:],
        "table": whole[:100] + bytes([whole[100] ^ 1]) + whole[101:],
        "garbage": np.random.default_rng(0).bytes(len(whole)),
    }
    kept.write_bytes(damaged[damage])
    assert [plain(pack) for pack in make(LENGTHS)] == expected
    assert kept.read_bytes() == whole


def test_a_folder_in_the_place_of_the_types_is_named(cache: Path) -> None:
    make(LENGTHS)
    (kept,) = (cache / "penstock" / "packs").iterdir()
    kept.unlink()
    kept.mkdir()
    with pytest.raises(DataFileIOError, match=rf"{kept} is a folder, but should be a file .*: remove it"):
        make(LENGTHS)


def test_a_damaged_block_is_an_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.storage.derived._CHECKED", 64)
    make(LENGTHS)
    (kept,) = (cache / "penstock" / "packs").iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    packs = make(LENGTHS)
    with pytest.raises(DataFileIOError, match="block 11 are damaged: remove the file"):
        packs.documents(np.arange(packs.packs))
    kept.unlink()
    make(LENGTHS).documents(np.arange(packs.packs))


def test_states_of_other_blocks_are_refused() -> None:
    state = make(LENGTHS).state_dict(3)
    for other in (make(LENGTHS, block_size=9), make(LENGTHS, order="global", block_size=None)):
        with pytest.raises(StateError, match="fingerprint"):
            other.load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": "none"}, "unknown order 'none'"),
        ({"block_size": 0}, "1 or more"),
        ({"order": "global", "block_size": 4}, "order='block'"),
    ],
)
def test_what_makes_no_sense(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(LENGTHS, **options)
    with pytest.raises(ConfigError, match="document 9 has a length of -1"):
        PackedDataset([[1]] * 10, 4, lengths=[1] * 9 + [-1], order="block", rank=0, world_size=1)
