"""`PackedDataset`: each token once, items as kernels take them, any ranks, resume, mixtures, filters."""

from __future__ import annotations

import itertools
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from full_run import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from loader_conformance import check_chain, check_end_of_pass, check_load_into_used, check_resume
from loader_support import plain
from packed_support import Documents, spans, tokens_of

from penstock import (
    DataLoader,
    DocumentDataset,
    ImageDataset,
    Mixture,
    PackedDataset,
    RankDataset,
    Subset,
    TableDataset,
    collate_packed,
)
from penstock.errors import ConfigError, DataFileError, PartitionError, SamplerError, StateError

LENGTHS = [5, 17, 1, 9, 3, 3, 40, 12, 7, 2, 0, 31, 8, 8, 6, 11, 4, 19, 16, 32, 1, 1, 10, 13]


def make(rank: int = 0, world: int = 1, lengths: Any = LENGTHS, capacity: int = 16, **options: Any) -> PackedDataset:
    return PackedDataset(Documents(lengths), capacity, rank=rank, world_size=world, **{"seed": 3, **options})


def every_token(lengths: Any, base: int = 0) -> list[int]:
    return [(base + row) * 1000 + i for row, length in enumerate(lengths) for i in range(length)]


def test_images_are_no_documents(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a.jpg 1\n")
    images = ImageDataset(RankDataset(tmp_path / "a.txt", rank=0, world_size=1), size=8)
    with pytest.raises(ConfigError, match=r"an ImageDataset makes items by position .* give documents of tokens"):
        PackedDataset(images, 10)


def test_an_item_is_what_models_take() -> None:
    packs = make()
    for number, pack in enumerate(packs):
        pieces = spans(pack)
        used = sum(length for _, _, length in pieces)
        ends = np.cumsum([length for _, _, length in pieces]).tolist()
        assert pack["cu_seqlens"].tolist()[: len(ends) + 1] == [0, *ends]
        assert set(pack["cu_seqlens"].tolist()[len(ends) + 1 :]) <= {16}
        ids, labels = pack["input_ids"].tolist(), pack["labels"].tolist()
        assert labels == [ids[i + 1] if i + 1 < used and i + 1 not in ends else -100 for i in range(16)]
        assert pack["position_ids"].tolist()[:used] == [i for _, _, length in pieces for i in range(length)]
        assert pack["document_ids"].tolist()[used:] == [-1] * (16 - used)
        assert not any(ids[used:])
        found = packs.documents(packs.rows([number]))
        assert list(zip(*(part.tolist() for part in found[:3]), strict=True)) == pieces


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=40).filter(any),
    st.integers(2, 24),
    st.integers(1, 6),
    st.integers(0, 3),
)
@settings(max_examples=examples(40, 300), deadline=None)
def test_every_token_once_an_epoch_on_all_ranks(lengths: list[int], capacity: int, world: int, epoch: int) -> None:
    had = []
    for rank in range(world):
        packs = make(rank, world, lengths, capacity, remainder="uneven")
        packs.set_epoch(epoch)
        had += list(packs)
    assert tokens_of(had) == every_token(lengths)


@given(st.integers(0, 23), st.integers(0, 3))
@settings(max_examples=examples(25, 100), deadline=None)
def test_the_packs_of_a_document_are_found(row: int, epoch: int) -> None:
    packs = make()
    where = packs.packs_of(row, epoch)
    found = packs.documents(where, epoch)
    pieces = [
        (int(begin), int(length))
        for of, begin, length in zip(found.rows, found.begins, found.lengths, strict=True)
        if of == row
    ]
    assert [begin for begin, _ in pieces] == [16 * number for number in range(len(pieces))]
    assert sum(length for _, length in pieces) == LENGTHS[row]


def test_each_epoch_deals_documents_anew_and_packs_are_full() -> None:
    lengths = np.random.default_rng(0).integers(1, 200, 3000)
    packs = make(lengths=lengths, capacity=256)
    assert packs.fill > 0.999
    assert packs.fill == lengths.sum() / (packs.packs * 256)
    first = {tuple(packs.documents([number], 0).rows.tolist()) for number in range(packs.packs)}
    second = {tuple(packs.documents([number], 1).rows.tolist()) for number in range(packs.packs)}
    assert len(first & second) < packs.packs // 4


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_global_batches_are_the_same_on_any_ranks(world: int) -> None:
    lengths = np.random.default_rng(1).integers(1, 200, 800)
    packs = [make(rank, world, lengths, 256) for rank in range(world)]
    per_rank = 24 // world
    for step in range(3):
        indices = range(step * per_rank, (step + 1) * per_rank)
        had = sorted(row for share in packs for row in share.rows(indices).tolist())
        assert had == sorted(make(lengths=lengths, capacity=256).rows(range(step * 24, step * 24 + 24)).tolist())


def test_packs_are_dealt_to_ranks_by_cost() -> None:
    lengths = np.minimum(np.random.default_rng(1).lognormal(6.2, 1.1, 30_000).astype(int) + 1, 8192)
    shares = [make(rank, 4, lengths, 8192, balance=8) for rank in range(4)]
    others = [make(rank, 4, lengths, 8192) for rank in range(4)]
    found = []
    for step in range(20):
        indices = range(step * 8, step * 8 + 8)
        rows = [share.rows(indices) for share in shares]
        plain_rows = np.concatenate([other.rows(indices) for other in others])
        assert sorted(np.concatenate(rows).tolist()) == sorted(plain_rows.tolist())
        costs = [int(shares[0].costs(mine).sum()) for mine in rows]
        found.append(max(costs) / np.mean(costs))
    assert np.mean(found) < 1.01
    assert max(found) < 1.03
    every = sorted(row for share in shares for row in share.rows(range(len(share))).tolist())
    assert len(set(every)) == shares[0].packs


def loader(rank: int = 0, world: int = 1, **options: Any) -> DataLoader:
    lengths = np.random.default_rng(2).integers(0, 30, 90)
    return DataLoader(make(rank, world, lengths, 32, balance=2), batch_size=2, **options)


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}], ids=str)
def test_conformance(options: dict[str, Any]) -> None:
    opened: list[DataLoader] = []

    def fresh() -> DataLoader:
        opened.append(loader(**options))
        return opened[-1]

    check_resume(fresh, passes=2, positions=None if not options else (0, 3, 20))
    check_end_of_pass(fresh)
    check_load_into_used(fresh)
    check_chain(fresh, [1, 4, 6, 2])
    for one in opened:
        one.close()


@pytest.mark.parametrize("stages", [[(2, 3), (3, 2), (1, None)], [(4, 1), (1, 5), (2, None)]], ids=str)
def test_every_token_once_over_changing_ranks(stages: list[Any]) -> None:
    state, had = None, []
    for world, count in stages:
        loaders = [loader(rank, world) for rank in range(world)]
        for one in loaders:
            if state is not None:
                one.load_state_dict(state)
        for iterator in map(iter, loaders):
            for number, batch in enumerate(iterator):
                had += [{name: values[i] for name, values in batch.items()} for i in range(len(batch["labels"]))]
                if count is not None and number + 1 == count:
                    break
        state = None if count is None else json.loads(json.dumps(loaders[0].state_dict()))
        assert state is None or len(json.dumps(state)) < 1000
    lengths = np.random.default_rng(2).integers(0, 30, 90)
    assert sorted(set(tokens_of(had))) == every_token(lengths)


@pytest.mark.parametrize("workers", [{"num_workers": 2}, {"num_workers": 2, "executor": "thread"}], ids=str)
def test_every_executor_makes_the_same(workers: dict[str, Any]) -> None:
    expected = [plain(batch) for batch in loader()]
    other = loader(**workers)
    assert [plain(batch) for batch in other] == expected
    other.close()


def test_documents_of_millions_of_tokens() -> None:
    lengths = [5, (1 << 20) + 3, 1 << 20, 3_000_001, (1 << 20) + 3, 7]
    packs = PackedDataset(Documents(lengths), 1 << 18, rank=0, world_size=1)
    found = packs.documents(np.arange(packs.packs))
    assert [int(found.lengths[found.rows == row].sum()) for row in range(6)] == lengths
    assert packs.packs == -(-sum(lengths) // (1 << 18))


# Over other data sets.


def test_a_filter_of_packs_is_a_filter_of_documents() -> None:
    mask = np.arange(len(LENGTHS)) % 3 > 0
    kept = Subset(make(), mask)
    assert isinstance(kept, PackedDataset)
    assert tokens_of(list(kept)) == [token for token in every_token(LENGTHS) if mask[token // 1000]]
    again = PackedDataset(Subset(Documents(LENGTHS), mask), 16, lengths=LENGTHS, rank=0, world_size=1, seed=3)
    assert [plain(pack) for pack in again] == [plain(pack) for pack in kept]


def test_rows_of_a_table_and_lengths_in_a_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tokens = [[row * 1000 + i for i in range(length)] for row, length in enumerate(LENGTHS)]
    table = pa.table({"input_ids": tokens, "n": LENGTHS, "text": ["x"] * len(LENGTHS)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    documents = TableDataset(tmp_path / "a.parquet", rank=0, world_size=1, seed=9)
    packs = PackedDataset(documents, 16, lengths="n", rank=0, world_size=1, seed=3)
    assert [plain(pack) for pack in packs] == [plain(pack) for pack in make()]
    some = Subset(documents, [1, 3, 7])
    packs = PackedDataset(some, 16, lengths="n", rank=0, world_size=1)
    assert {token // 1000 for token in tokens_of(list(packs))} == {1, 3, 7}
    with pytest.raises(ConfigError, match="columns are input_ids, n, text"):
        PackedDataset(documents, 16, lengths="m", rank=0, world_size=1)
    with pytest.raises(ConfigError, match="integers"):
        PackedDataset(documents, 16, lengths="text", rank=0, world_size=1)


@pytest.mark.parametrize("source", ["column", "documents"])
def test_a_pickle_does_not_hold_lengths_that_the_cache_has(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if source == "column":
        pq.write_table(pa.table({"n": np.arange(50_000) % 7}), tmp_path / "a.parquet")
        packs = PackedDataset(TableDataset(tmp_path / "a.parquet", rank=0, world_size=1), 16, lengths="n")
    else:
        (np.arange(300_000, dtype=np.uint16) % 6).tofile(tmp_path / "a.bin")
        files = DocumentDataset(tmp_path / "a.bin", dtype="uint16", end_token=0, rank=0, world_size=1)
        packs = PackedDataset(files, 16, rank=0, world_size=1)
    data = pickle.dumps(packs)
    assert len(data) < 20_000
    assert pickle.loads(data).lengths[:9].tolist() == packs.lengths[:9].tolist()


@given(st.data())
@settings(max_examples=examples(20, 200), deadline=None)
def test_filters_of_mixtures_of_filters_packed_on_changing_ranks(data: Any) -> None:
    """Every document once, whatever is composed."""
    sizes = data.draw(st.lists(st.integers(3, 12), min_size=1, max_size=3))
    lengths = [data.draw(st.lists(st.integers(1, 30), min_size=n, max_size=n)) for n in sizes]
    inner = [data.draw(st.lists(st.booleans(), min_size=n, max_size=n)) for n in sizes]
    inner = [mask if any(mask) else [True] * len(mask) for mask in inner]
    sources = [
        Subset(Documents(own, base=100 * number), np.array(mask))
        for number, (own, mask) in enumerate(zip(lengths, inner, strict=True))
    ]
    left = [
        (100 * number + row, own[row]) for number, own in enumerate(lengths) for row in np.flatnonzero(inner[number])
    ]
    outer = np.array([True if count % 4 else data.draw(st.booleans()) for count in range(1, len(left) + 1)])
    starts = np.cumsum([0, *map(len, sources)])
    for begin, end in itertools.pairwise(starts):
        outer[begin] |= not outer[begin:end].any()
    world = [data.draw(st.integers(1, 4)) for _ in range(2)]

    def share(rank: int, ranks: int) -> Any:
        mixed = Mixture([(source, 1) for source in sources], mode="repeat", rank=rank, world_size=ranks, seed=1)
        return DataLoader(PackedDataset(Subset(mixed, outer), 16), batch_size=2)

    loaders, had, state = [share(rank, world[0]) for rank in range(world[0])], [], None
    for one in loaders:
        iterator = iter(one)
        batch = next(iterator, None)
        had += [] if batch is None else [{k: v[i] for k, v in batch.items()} for i in range(len(batch["labels"]))]
        state = one.state_dict() if state is None else state
    for rank in range(world[1]):
        one = share(rank, world[1])
        one.load_state_dict(state)
        if one.epoch == 0:
            had += [{k: v[i] for k, v in batch.items()} for batch in one for i in range(len(batch["labels"]))]
    expected = [row * 1000 + i for (row, length), keep in zip(left, outer, strict=True) if keep for i in range(length)]
    assert sorted(set(tokens_of(had))) == sorted(expected)


def test_weights_of_a_packed_mixture_stay_those_of_documents() -> None:
    short, long = Documents([4] * 1000), Documents([64] * 250, base=10_000)
    mixed = Mixture([(short, 3), (long, 1)], stop=2000, schedule=[(1000, [0, 1])], rank=0, world_size=1)
    packs = PackedDataset(mixed, 64)
    assert len(packs) == round(750 / 16 + 250) + 1000
    documents = [pack["document_ids"].max() + 1 for pack in packs]
    assert abs(sum(int(n) for n in documents if n > 1) - 750) < 32
    packs.set_epoch(2)
    assert {int(pack["document_ids"].max()) for pack in packs} == {0}
    tokens = Mixture(
        [
            (PackedDataset(part, 64, max_documents=16, rank=0, world_size=1), weight)
            for part, weight in ((short, 3), (long, 1))
        ],
        stop=1000,
        rank=0,
        world_size=1,
    )
    assert tokens.counts(1000) == {"source 0": 750, "source 1": 250}
    state = json.loads(json.dumps(tokens.state_dict(20)))
    rest = pickle.loads(pickle.dumps(tokens))
    rest.load_state_dict(state)
    assert [plain(pack) for pack in rest][:5] == [plain(tokens[i]) for i in range(20, 25)]


@pytest.mark.parametrize("schedule", [[(5, [1, 0]), (6, [0, 1])], [(1, [0, 1])]], ids=str)
def test_weights_of_less_than_a_pack_are_passed_over(schedule: Any) -> None:
    sources = [(Documents([3] * 20), 1), (Documents([4] * 20, base=100), 1)]
    packs = PackedDataset(Mixture(sources, stop=40, schedule=schedule, rank=0, world_size=1), 40)
    assert {token // 1000 >= 100 for token in tokens_of([packs[index] for index in range(1, len(packs))])} == {True}


def test_one_row_of_bounds_for_a_batch() -> None:
    packs = make()
    batch = collate_packed([packs[0], packs[1], packs[2]])
    bounds = batch["cu_seqlens"]
    assert bounds.dtype == torch.int32
    expected = [0]
    for number in range(3):
        lengths = [length for _, _, length in spans(packs[number])]
        padding = 16 - sum(lengths)
        expected += [*lengths, *([padding] if padding else [])]
    assert bounds.tolist() == np.cumsum(expected).tolist()
    assert batch["max_seqlen"] == max(expected)
    assert batch["input_ids"].shape == (3, 16)


# Errors.


def test_a_document_of_another_length_is_named() -> None:
    packs = PackedDataset(Documents([4, 5, 6]), 16, lengths=[4, 5, 7], rank=0, world_size=1)
    with pytest.raises(DataFileError, match="document 2 has 6 tokens, but lengths= says 7"):
        packs[0]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (((), 0), ConfigError, "capacity"),
        (([[1]], 4), ConfigError, "lengths of the documents of this list are unknown"),
        (([[1]], 4, {"lengths": [1, 2]}), ConfigError, "2 lengths for 1 document"),
        (([[1]], 4, {"lengths": [-1]}), ConfigError, "document 0 has a length of -1"),
        (([[1]], 4, {"lengths": [0.5]}), SamplerError, "integers"),
        (([[1]], 4, {"lengths": "n"}), ConfigError, "no columns"),
        (([[1]], 4, {"lengths": [1], "balance": 0}), ConfigError, "balance"),
        ((iter([]), 4), ConfigError, "with __len__ and __getitem__"),
        (([[1]], 4, {"lengths": [1], "shuffle": "none"}), TypeError, "shuffle"),
    ],
)
def test_what_makes_no_sense(arguments: Any, error: Any, message: str) -> None:
    dataset, capacity, *options = arguments
    with pytest.raises(error, match=message):
        PackedDataset(dataset, capacity, **(options[0] if options else {}), rank=0, world_size=1)


def test_packs_and_shares_are_no_documents(write_manifest: Any) -> None:
    with pytest.raises(ConfigError, match="already packed"):
        PackedDataset(make(), 16)
    share = RankDataset(write_manifest(5), rank=0, world_size=2)
    with pytest.raises(PartitionError, match="one rank's share"):
        PackedDataset(share, 16, lengths=[1] * 5)


def test_states_of_other_packs_are_refused() -> None:
    state = make().state_dict(3)
    others = [make(lengths=[*LENGTHS[:-1], 12]), make(capacity=17), make(max_documents=2)]
    for other in others:
        with pytest.raises(StateError, match="fingerprint"):
            other.load_state_dict(state)
    make().load_state_dict(state)
