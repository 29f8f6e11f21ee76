"""`KeptRows`: look-ups and their inverse, files in the cache, and pickles."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from multiprocessing.context import set_spawning_popen
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock.plan.filter as module
from penstock.errors import DataFileError, DataFileIOError
from penstock.plan.filter import KeptRows


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "penstock" / "filters"


def check(kept: KeptRows, rows: np.ndarray) -> None:
    assert len(kept) == len(rows)
    assert (kept[np.arange(len(rows))] == rows).all()
    for place in (0, len(rows) // 2, -1):
        assert kept[place] == rows[place]
        assert kept.places_of(np.array([rows[place]]))[0] == np.flatnonzero(rows == rows[place])[0]


@pytest.mark.parametrize("share", [0.001, 0.02, 0.5])
def test_a_large_set_is_a_mapped_file(share: float, cache: Path) -> None:
    mask = np.random.default_rng(0).random(module.CHUNK * 2 + 5) < share
    kept = KeptRows.of_mask(mask)
    check(kept, np.flatnonzero(mask))
    assert (kept.path is None) == (share == 0.001)
    assert list(cache.glob("*")) == ([] if kept.path is None else [kept.path])
    assert kept.nbytes == 40 + 4 * np.count_nonzero(mask)
    same = KeptRows.of_rows(np.flatnonzero(mask), len(mask))
    assert (same.fingerprint, same.path) == (kept.fingerprint, kept.path)


@given(rows=st.lists(st.integers(-30, 29), min_size=1, max_size=60))
@settings(max_examples=40)
def test_rows_in_any_order(rows: list[int]) -> None:
    check(KeptRows.of_rows(np.array(rows), 30), np.array(rows) % 30)


def test_no_rows() -> None:
    for kept in (KeptRows.of_mask(np.zeros(9, np.bool_)), KeptRows.of_rows(np.empty(0, np.int64), 9)):
        assert len(kept) == 0
        assert kept.places_of(np.array([3])).tolist() == []


def test_a_row_outside_is_an_error() -> None:
    with pytest.raises(IndexError, match="index 9 is out of range for 9 elements"):
        KeptRows.of_rows(np.array([1, 9]), 9)
    with pytest.raises(IndexError):
        KeptRows.of_mask(np.ones(3, np.bool_))[3]


def test_other_rows_have_another_fingerprint() -> None:
    prints = {
        KeptRows.of_rows(np.array(rows), of).fingerprint
        for rows, of in (([1, 2], 5), ([2, 1], 5), ([1], 5), ([1, 2], 6))
    }
    assert len(prints) == 4


def test_a_pickle_for_a_worker_is_a_handle_and_another_holds_the_rows(cache: Path) -> None:
    mask = np.random.default_rng(0).random(1 << 20) < 0.5
    kept = KeptRows.of_mask(mask)
    assert copy.deepcopy(kept) is kept
    set_spawning_popen(object())
    try:
        handle = pickle.dumps(kept)
    finally:
        set_spawning_popen(None)
    whole = pickle.dumps(kept)
    assert len(handle) < 2000 < 1 << 17 < len(whole)
    check(pickle.loads(handle), np.flatnonzero(mask))
    assert kept.path is not None
    kept.path.unlink()  # as on another machine
    with pytest.raises(DataFileError, match="missing on this machine"):
        pickle.loads(handle)
    check(pickle.loads(whole), np.flatnonzero(mask))
    assert kept.path.exists()


def test_a_full_disk_leaves_the_rows_in_memory(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("penstock.storage.derived.write_derived", full)
    mask = np.random.default_rng(0).random(1 << 20) < 0.5
    with pytest.warns(UserWarning, match="No space left on device"):
        kept = KeptRows.of_mask(mask)
    check(kept, np.flatnonzero(mask))


def test_numbers_of_a_table_of_2_to_the_31_rows_and_more() -> None:
    for of, size in ((2**31 - 1, 4), (2**31, 8), (2**40, 8)):
        rows = np.array([0, 5, of - 1])
        kept = KeptRows.of_rows(rows, of)
        check(kept, rows)
        assert kept.nbytes == 40 + 3 * size
        assert kept.places_of(np.array([of - 2, 5])).tolist() == [1]
        assert kept.between(5, of)[np.arange(2)].tolist() == [0, of - 6]


@given(rows=st.lists(st.integers(0, 29), max_size=60), begin=st.integers(0, 30), size=st.integers(0, 30))
@settings(max_examples=40)
def test_part_of_the_rows_and_all_places(rows: list[int], begin: int, size: int) -> None:
    for given_rows in (np.array(rows, np.int64), np.unique(rows).astype(np.int64)):
        kept, end = KeptRows.of_rows(given_rows, 30), min(begin + size, 30)
        part = given_rows[(given_rows >= begin) & (given_rows < end)] - begin
        found = kept.between(begin, end)
        assert (found.rows, len(found)) == (end - begin, len(part))
        assert (found[np.arange(len(part))] == part).all()
        some = np.arange(begin, end)
        assert kept.places_of(some).tolist() == np.flatnonzero(np.isin(given_rows, some)).tolist()


def test_named_rows_are_computed_once(cache: Path) -> None:
    def chunks() -> Iterator[np.ndarray]:
        calls.append(1)
        yield np.array([1, 3])
        yield np.array([7])

    calls: list[int] = []
    first, second = (KeptRows.of_chunks(chunks, 9, name="odd") for _ in range(2))
    assert len(calls) == 1
    assert [first.path] == [second.path] == list(cache.iterdir())
    assert first.fingerprint == KeptRows.of_rows(np.array([1, 3, 7]), 9).fingerprint
    check(second, np.array([1, 3, 7]))


def test_an_error_while_rows_are_computed_leaves_no_file(cache: Path) -> None:
    def chunks() -> Iterator[np.ndarray]:
        yield np.array([1, 3])
        raise DataFileIOError("unreadable")

    with pytest.raises(DataFileIOError, match="unreadable"):
        KeptRows.of_chunks(chunks, 9, name="broken")
    assert list(cache.iterdir()) == []
