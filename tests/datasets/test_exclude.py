"""``exclude=``: rows that nobody gets any more, and nothing else that changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from entries_support import closed, opened
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_support import Documents, spans

from penstock import DataLoader, DistributedSampler, Ledger, Manifest, Mixture, PackedDataset, RankDataset, Subset
from penstock.errors import ConfigError, StateError


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: Any) -> Manifest:
    path: Path = tmp_path_factory.mktemp("manifest") / "train.txt"
    path.write_text("".join(f"{i:03}.jpg {i % 7}\n" for i in range(60)))
    return Manifest.open(path)


def rows(dataset: Any) -> list[int]:
    return [item[2] for item in dataset.__getitems__(range(len(dataset)))]


@given(st.sets(st.integers(-60, 59), min_size=1, max_size=50), st.integers(0, 3), st.sampled_from(["global", "block"]))
@settings(max_examples=25)
def test_excluded_rows_are_replaced_and_others_stay(
    manifest: Manifest, bad: set[int], epoch: int, shuffle: str
) -> None:
    excluded = {row % 60 for row in bad}
    plain = RankDataset(manifest, rank=0, world_size=1, seed=3, shuffle=shuffle)
    made = RankDataset(manifest, rank=0, world_size=1, seed=3, shuffle=shuffle, exclude=list(bad))
    for dataset in (plain, made):
        dataset.set_epoch(epoch)
    before, after = rows(plain), rows(made)
    assert not excluded & set(after)
    assert all(a == b for a, b in zip(before, after, strict=True) if a not in excluded)


def test_ranks_and_filters_agree(manifest: Manifest) -> None:
    whole = rows(RankDataset(manifest, rank=0, world_size=1, exclude=[3, 4, 5]))
    shares = [rows(RankDataset(manifest, rank=rank, world_size=3, exclude=[3, 4, 5])) for rank in range(3)]
    assert [shares[i % 3][i // 3] for i in range(60)] == whole
    kept = Subset(RankDataset(manifest, rank=0, world_size=1, exclude=[3, 4, 5]), np.arange(60) < 10)
    assert set(rows(kept)) <= {0, 1, 2, 6, 7, 8, 9}


def test_a_run_goes_on_without_rows(manifest: Manifest) -> None:
    plain = DataLoader(RankDataset(manifest, rank=0, world_size=1), batch_size=4)
    had = [next(iterator := iter(plain))[2].tolist(), *(next(iterator)[2].tolist() for _ in range(3))]
    state = plain.state_dict()
    bad = had[0][:2] + next(iterator)[2].tolist()
    without = DataLoader(RankDataset(manifest, rank=0, world_size=1, exclude=bad), batch_size=4)
    without.load_state_dict(state)
    rest = [row for batch in without for row in batch[2].tolist()]
    assert len(rest) == 44
    assert not set(bad) & set(rest)
    after = without.state_dict()
    with pytest.raises(StateError, match="other excluded rows"):
        plain.load_state_dict(after)
    with pytest.raises(StateError, match="other excluded rows"):
        DataLoader(RankDataset(manifest, rank=0, world_size=1, exclude=[1]), batch_size=4).load_state_dict(after)


def test_a_second_spike_makes_the_list_longer(manifest: Manifest) -> None:
    def state_of(exclude: list[int] | None) -> dict[str, Any]:
        return RankDataset(manifest, rank=0, world_size=1, exclude=exclude).state_dict(10)

    longer = RankDataset(manifest, rank=0, world_size=1, exclude=[4, 9, 30])
    for had in (None, [], [4], [9, 30], [30, 4, 9]):
        longer.load_state_dict(json.loads(json.dumps(state_of(had))))
        assert not {4, 9, 30} & set(rows(longer))
    assert opened(state_of([9, 4]))["excluded"][0] == 2
    for had in ([4, 9, 31], [4, 9, 30, 31]):
        with pytest.raises(StateError, match=rf"other excluded rows: {len(had)} with the hash .* has 3\. Pass"):
            longer.load_state_dict(state_of(had))
    with pytest.raises(StateError, match=r"other excluded rows: 1 with the hash .* has 0\."):
        RankDataset(manifest, rank=0, world_size=1).load_state_dict(state_of([4]))


def test_a_damaged_entry_of_a_state(manifest: Manifest) -> None:
    longer = RankDataset(manifest, rank=0, world_size=1, exclude=[4, 9])
    state = longer.state_dict()
    for damaged in (None, [], ["abc", 1], {"abc": 1}, 3, "abc"):
        with pytest.raises(StateError, match="is damaged"):
            longer.load_state_dict(closed({**opened(state), "excluded": damaged}))


def test_a_ledger_knows_them(manifest: Manifest) -> None:
    loader = DataLoader(RankDataset(manifest, rank=0, world_size=1, exclude=range(20)), batch_size=6)
    ledger = Ledger(loader)
    for step, batch in enumerate(loader):
        assert ledger.rows(step).rows.tolist() == batch[2].tolist()
        for row in batch[2].tolist():
            assert step in [found.step for found in ledger.steps(row, epoch=0)]
    assert ledger.steps(3, epoch=0) == []


@pytest.mark.parametrize(
    ("exclude", "error", "message"),
    [
        ([60], IndexError, "exclude=: index 60 is out of range for 60"),
        (np.array([2**63 + 1], np.uint64), IndexError, "exclude=: index 9223372036854775809 is out of range"),
        ([0.5], ConfigError, "array of row numbers"),
        (range(60), ConfigError, "leaves none of 60 rows"),
        (range(100_001), ConfigError, "at most 100,000 rows, got 100,001"),
    ],
)
def test_what_makes_no_sense(manifest: Manifest, exclude: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        RankDataset(manifest, rank=0, world_size=1, exclude=exclude)


def test_a_row_that_is_named_often_counts_once(manifest: Manifest) -> None:
    often = RankDataset(manifest, rank=0, world_size=1, exclude=[3] * 100_001)
    assert often.state_dict() == RankDataset(manifest, rank=0, world_size=1, exclude=[3]).state_dict()


# Mixtures.

SIZES = (30, 40, 12)


def sources() -> list[Any]:
    return [range(base, base + size) for base, size in zip((0, 1000, 2000), SIZES, strict=True)]


def mixture(rank: int = 0, world: int = 1, exclude: Any = None) -> Mixture:
    pairs = list(zip(sources(), (3, 2, 1), strict=True))
    names, schedule = ["web", "books", "code"], [(70, [1, 1, 1])]
    return Mixture(
        pairs, stop=100, schedule=schedule, names=names, seed=4, rank=rank, world_size=world, exclude=exclude
    )


def had(dataset: Any, epoch: int) -> list[int]:
    dataset.set_epoch(epoch)
    return [dataset[i] for i in range(len(dataset))]


EXCLUDED = st.tuples(*(st.sets(st.integers(0, size - 1), max_size=size - 1) for size in SIZES))


@given(EXCLUDED, st.integers(0, 3), st.integers(1, 3))
@settings(max_examples=25)
def test_rows_of_each_source_are_replaced_by_others_of_it(bad: Any, epoch: int, world: int) -> None:
    exclude = dict(zip(("web", "books", "code"), map(sorted, bad), strict=True))
    out = {base + row for base, rows in zip((0, 1000, 2000), bad, strict=True) for row in rows}
    before, after = had(mixture(), epoch), had(mixture(exclude=exclude), epoch)
    assert not out & set(after)
    assert all(
        new == old if old not in out else new // 1000 == old // 1000 for old, new in zip(before, after, strict=True)
    )
    shares = [had(mixture(rank, world, exclude), epoch) for rank in range(world)]
    assert [shares[i % world][i // world] for i in range(100)] == after

    ledger = Ledger(DataLoader(mixture(exclude=exclude), batch_size=7))
    steps = range(epoch * ledger.steps_per_epoch, (epoch + 1) * ledger.steps_per_epoch)
    said = [found for step in steps for found in zip(*ledger.rows(step)[slice(1, 5, 3)], strict=True)]
    assert [int(row + 1000 * source) for row, source in said] == after
    for row, source in {(int(row), int(source)) for row, source in said[::5]}:
        places = [steps[0] + at // 7 for at, value in enumerate(after) if value == row + 1000 * source]
        assert [found.step for found in ledger.steps(row, source=source, epoch=epoch)] == sorted(places)
    for number, rows in enumerate(bad):
        for row in list(rows)[:2]:
            assert ledger.steps(row, source=number, epoch=epoch) == []


def test_sources_that_exclude_rows_themselves(manifest: Manifest) -> None:
    def made(own: Any, given: Any, **options: Any) -> Mixture:
        share = RankDataset(manifest, rank=0, world_size=1, exclude=own)
        return Mixture([(share, 1), (share, 1)], stop=50, rank=0, world_size=1, exclude=given, **options)

    both, given = made([3, 4], None), made(None, [[3, 4], [3, 4]])
    numbers = [item[2] for item in had(both, 1)]
    assert numbers == [item[2] for item in had(given, 1)]
    assert not {3, 4} & set(numbers)
    assert opened(both.state_dict())["excluded"] == opened(given.state_dict())["excluded"]
    assert not {3, 4, 9} & {item[2] for item in had(made([3, 4], [[9], [9]]), 0)}
    filtered = Subset(made([3], [[5, 7], [7, 5]]), np.arange(120) % 2 == 1)
    assert {item[2] for item in had(filtered, 0)} <= {row for row in range(60) if row % 2 and row not in (3, 5, 7)}


def test_a_mixture_goes_on_without_rows() -> None:
    plain = DataLoader(mixture(), batch_size=10)
    iterator = iter(plain)
    _ = [next(iterator) for _ in range(4)]
    state = plain.state_dict()
    rest = [value for batch in iterator for value in batch.tolist()]
    loader = DataLoader(mixture(exclude={"web": [5, 6], "code": range(11)}), batch_size=10)
    loader.load_state_dict(state)
    kept = [value for batch in loader for value in batch.tolist()]
    out = {5, 6, *range(2000, 2011)}
    assert [a for a, b in zip(kept, rest, strict=True) if b not in out] == [b for b in rest if b not in out]
    assert not out & set(kept)
    with pytest.raises(StateError, match="other excluded rows"):
        plain.load_state_dict(loader.state_dict())
    more = DataLoader(mixture(exclude={"web": [5, 6], "books": [7], "code": range(11)}), batch_size=10)
    more.load_state_dict(loader.state_dict())
    with pytest.raises(StateError, match="other excluded rows: 14 with the hash"):
        loader.load_state_dict(more.state_dict())


@pytest.mark.parametrize(
    ("exclude", "message"),
    [
        ({"sea": [1]}, "rows of 'sea'"),
        ([1, 2, 3], "dict from source names"),
        ([[1]], "dict from source names"),
        (7, "dict from source names"),
    ],
)
def test_rows_of_no_source(exclude: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mixture(exclude=exclude)


@pytest.mark.parametrize(
    ("exclude", "error", "message"),
    [
        ({"web": [900]}, IndexError, "^web: exclude=: index 900 is out of range for 900"),
        ({"web": [0], "books": range(300)}, ConfigError, "^books: exclude= leaves none of 300 rows"),
        ([None, [0.5]], ConfigError, "^books: exclude= takes an array of row numbers"),
    ],
)
def test_the_source_is_named(exclude: Any, error: Any, message: str) -> None:
    sources: list[tuple[Any, int]] = [(range(900), 3), (range(300), 1)]
    with pytest.raises(error, match=message):
        Mixture(sources, names=["web", "books"], exclude=exclude, rank=0, world_size=1)
    documents = [(Documents([3] * len(source)), weight) for source, weight in sources]
    had = {"web": [5], "books": [7]}
    of_documents = Mixture(documents, names=["web", "books"], exclude=had, rank=0, world_size=1)
    with pytest.raises(error, match=message):
        PackedDataset(of_documents, 32, lengths=[[3] * 900, [3] * 300], exclude=exclude)


# Packs.

LENGTHS = [*np.random.default_rng(0).integers(1, 12, 60).tolist(), 70, 33, 32, 100, 5, 0]


def packs(exclude: Any = None, documents: Any = None, **options: Any) -> Any:
    share = {"rank": 0, "world_size": 1, **options}
    return PackedDataset(Documents(LENGTHS) if documents is None else documents, 32, exclude=exclude, seed=2, **share)


def pieces(dataset: Any, epoch: int) -> list[list[tuple[int, int, int]]]:
    return [spans(pack) for pack in had(dataset, epoch)]


@given(st.sets(st.integers(0, len(LENGTHS) - 1), max_size=50), st.integers(0, 2), st.sampled_from(["global", "block"]))
@settings(max_examples=25)
def test_documents_are_replaced_by_others_as_long(bad: set[int], epoch: int, order: str) -> None:
    options = {"order": order, **({"block_size": 33} if order == "block" else {})}
    if order == "block" and any(set(range(b, min(b + 33, len(LENGTHS) - 1))) <= bad for b in (0, 33)):
        return
    before, after = pieces(packs(**options), epoch), pieces(packs(sorted(bad), **options), epoch)
    instead: dict[int, int] = {}
    for one, other in zip(before, after, strict=True):
        for (old, begin, length), (new, at, found) in zip(one, other, strict=True):
            if old not in bad:
                assert (new, at, found) == (old, begin, length)
                continue
            assert new not in bad
            assert instead.setdefault(old, new) == new
            lengths = {LENGTHS[row] for row in left(order, old) - bad}
            assert LENGTHS[new] == min((one for one in lengths if one >= LENGTHS[old]), default=max(lengths))
            assert at == (begin if begin < LENGTHS[new] else 0)
            assert found == min(length, LENGTHS[new] - at)
    check_ledger(packs(sorted(bad), **options), after, epoch, bad)


def blocks(order: str) -> list[range]:
    return [range(66)] if order == "global" else [range(33), range(33, 66)]


def left(order: str, row: int) -> set[int]:
    return next(set(block) for block in blocks(order) if row in block)


def check_ledger(dataset: Any, found: list[Any], epoch: int, bad: set[int]) -> None:
    """Compare what a ledger says with the documents of each pack."""
    ledger = Ledger(DataLoader(dataset, batch_size=2))
    first = epoch * ledger.steps_per_epoch
    for step in range(ledger.steps_per_epoch):
        here = [row for pack in found[2 * step : 2 * step + 2] for row, _, _ in pack]
        assert ledger.rows(first + step).rows.tolist() == here
    for row in range(0, len(LENGTHS), 3):
        holds = [first + at // 2 for at, pack in enumerate(found) if row in {document for document, _, _ in pack}]
        assert [place.step for place in ledger.steps(row, epoch=epoch)] == holds
        assert not (row in bad and holds)


def test_packs_of_mixtures_and_filters() -> None:
    parts = [(Documents(LENGTHS), 2), (Documents([30] * 40 + [7] * 9, base=500), 1)]
    exclude = [[0, 1, 60], list(range(30))]
    out = {0, 1, 60, *range(500, 530)}
    inside = PackedDataset(Mixture(parts, stop=200, rank=0, world_size=1, seed=4, exclude=exclude), 32)
    outside = PackedDataset(Mixture(parts, stop=200, rank=0, world_size=1, seed=4), 32, exclude=exclude)
    plain = PackedDataset(Mixture(parts, stop=200, rank=0, world_size=1, seed=4), 32)
    mixed = Mixture([(part, 1) for part in plain.sources], stop=90, rank=0, world_size=1, exclude=exclude)
    before, found = pieces(plain, 0), pieces(inside, 0)
    assert found == pieces(outside, 0)
    assert opened(inside.state_dict())["excluded"] == opened(outside.state_dict())["excluded"]
    for made in (found, pieces(mixed, 0)):
        assert not out & {document for pack in made for document, _, _ in pack}
    kept = [pack for pack, old in zip(found, before, strict=True) if not out & {document for document, _, _ in old}]
    assert kept == [old for old in before if not out & {document for document, _, _ in old}]
    loader = DataLoader(inside, batch_size=3)
    for step, said in enumerate(map(Ledger(loader).rows, range(4))):
        here = [document for pack in found[3 * step : 3 * step + 3] for document, _, _ in pack]
        assert (said.rows + 500 * said.sources).tolist() == here
    odd = Subset(packs([1, 3, 60]), np.arange(len(LENGTHS)) % 2 == 1)
    rows = {document for pack in pieces(odd, 0) for document, _, _ in pack}
    assert rows <= {row for row in range(66) if row % 2 and row not in (1, 3)}


def test_packs_go_on_without_documents_on_other_ranks() -> None:
    loaders = [DataLoader(packs(rank=rank, world_size=2), batch_size=2) for rank in range(2)]
    iterators = [iter(loader) for loader in loaders]
    _ = [next(iterator) for iterator in iterators]
    state = loaders[0].state_dict()
    loader = DataLoader(packs([2, 3, 60]), batch_size=3)
    loader.load_state_dict(state)
    found = [spans(pack) for batch in loader for pack in _packs(batch)]
    assert found == pieces(packs([2, 3, 60]), 0)[4:]
    with pytest.raises(StateError, match="other excluded rows"):
        loaders[0].load_state_dict(loader.state_dict())
    DataLoader(packs([2, 3, 4, 60]), batch_size=3).load_state_dict(loader.state_dict())


def _packs(batch: dict[str, Any]) -> list[dict[str, Any]]:
    return [{name: values[i] for name, values in batch.items()} for i in range(len(batch["labels"]))]


def test_no_document_that_is_left() -> None:
    with pytest.raises(ConfigError, match="leaves none of 66 rows to replace the excluded ones"):
        packs(range(65))
    with pytest.raises(ConfigError, match="no tokens in documents 33 to 65"):
        packs(range(33, 65), order="block", block_size=33)


def test_a_plain_filter_has_other_rows_in_their_places() -> None:
    data = list(range(100, 160))
    sampler = DistributedSampler(data, 1, 0, shuffle="global", seed=0)
    plain = DataLoader(data, batch_size=7, sampler=sampler)
    iterator = iter(plain)
    next(iterator)
    state = plain.state_dict()
    rest = [value for batch in iterator for value in batch.tolist()]
    rows = np.arange(60)
    rows[[17, 30]] = [18, 31]
    loader = DataLoader(Subset(data, rows), batch_size=7, sampler=sampler)
    loader.load_state_dict(state)
    found = [value for batch in loader for value in batch.tolist()]
    assert found == [{117: 118, 130: 131}.get(value, value) for value in rest]
