"""`KeptRows`: the forms that they take, files in the cache, and how they travel."""

from __future__ import annotations

import copy
import pickle
from multiprocessing.context import set_spawning_popen
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock.plan.filter as module
from penstock import storage
from penstock.errors import DataFileError
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
        assert kept.ordinals(np.array([rows[place]]))[0] == np.flatnonzero(rows == rows[place])[0]


@pytest.mark.parametrize("share", [0.001, 0.02, 0.5])
def test_a_large_set_is_a_mapped_file(share: float, cache: Path) -> None:
    mask = np.random.default_rng(0).random(module.CHUNK * 2 + 5) < share
    kept = KeptRows.of_mask(mask)
    check(kept, np.flatnonzero(mask))
    assert (kept.path is None) == (share == 0.001)
    assert len(list(cache.glob("*.kept"))) == (kept.path is not None)
    assert len(kept._data) < len(mask) // 6
    same = KeptRows.of_rows(np.flatnonzero(mask), len(mask))
    assert (same.fingerprint, same.path) == (kept.fingerprint, kept.path)


@given(rows=st.lists(st.integers(-30, 29), min_size=1, max_size=60))
@settings(max_examples=40)
def test_rows_in_any_order(rows: list[int]) -> None:
    check(KeptRows.of_rows(np.array(rows), 30), np.array(rows) % 30)


def test_no_rows() -> None:
    for kept in (KeptRows.of_mask(np.zeros(9, np.bool_)), KeptRows.of_rows(np.empty(0, np.int64), 9)):
        assert len(kept) == 0
        assert kept.ordinals(np.array([3])).tolist() == [-1]


def test_a_row_outside_is_an_error() -> None:
    with pytest.raises(IndexError, match="index 9 is out of range for 9"):
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

    monkeypatch.setattr(storage, "write_kept", full)
    mask = np.random.default_rng(0).random(1 << 20) < 0.5
    with pytest.warns(UserWarning, match="No space left on device"):
        kept = KeptRows.of_mask(mask)
    check(kept, np.flatnonzero(mask))


def test_another_file_of_that_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.kept"
    path.write_bytes(b"x" * 200)
    with pytest.raises(DataFileError, match=r"other\.kept"):
        KeptRows._mapped(path)
