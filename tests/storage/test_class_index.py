"""The index of rows by class: a stable counting sort, made once as a mapped file."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError, DataFileIOError
from penstock.storage import class_index
from penstock.storage.class_index import ClassIndex, digest_of

KEYS = np.random.default_rng(3).integers(0, 7, 5_000).astype(np.uint8)


def expected(keys: Any, count: int) -> tuple[list[int], list[int]]:
    """Return rows and starts as NumPy's own stable sort has them."""
    rows = np.argsort(keys, kind="stable")
    return rows.tolist(), np.searchsorted(np.asarray(keys)[rows], np.arange(count + 1)).tolist()


def rows_of(index: ClassIndex) -> list[int]:
    return index.rows(np.arange(len(index))).tolist()


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 20), max_size=60), st.sampled_from([np.uint8, np.int16, np.uint64]), st.integers(21, 300)
)
def test_it_is_a_stable_sort(keys: list[int], dtype: type, count: int) -> None:
    index = ClassIndex(np.array(keys, dtype=dtype), count)
    assert (rows_of(index), index.starts.tolist()) == expected(keys, count)
    rows = np.arange(len(keys))
    assert index.rows(index.places(rows)).tolist() == rows.tolist()


def test_the_file_has_what_memory_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(class_index, "_CHUNK", 333)  # so that a class grows over many chunks
    index = ClassIndex(KEYS, 9, cache_dir=tmp_path)
    assert (rows_of(index), index.starts.tolist()) == expected(KEYS, 9)
    (path,) = tmp_path.iterdir()
    made = path.stat()
    assert made.st_size == 64 + 8 * 10 + 4 * len(KEYS)
    assert rows_of(ClassIndex(KEYS, 9, cache_dir=tmp_path)) == rows_of(index)
    assert path.stat().st_mtime_ns == made.st_mtime_ns, "it is made once"
    assert list(tmp_path.iterdir()) == [path]


def test_large_tables_are_mapped_by_each_copy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(class_index, "_SHARED_FROM", 5_000)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    index = ClassIndex(KEYS, 7)
    before = len(pickle.dumps(index))
    rows = rows_of(index)
    (path,) = (tmp_path / "penstock" / "classes").iterdir()
    pickled = pickle.dumps(index)
    assert len(pickled) == before, "an index travels without its rows"
    assert rows_of(pickle.loads(pickled)) == rows
    path.unlink()
    assert rows_of(pickle.loads(pickled)) == rows, "made again where it is missing"
    small = ClassIndex(KEYS[:100], 7)
    assert rows_of(small) == expected(KEYS[:100], 7)[0]
    assert list(path.parent.iterdir()) == [path]


def test_keys_may_be_anything_with_slices(tmp_path: Path) -> None:
    class Halved:
        def __len__(self) -> int:
            return len(KEYS)

        def __getitem__(self, part: slice) -> Any:
            return KEYS[part] // 2

    assert rows_of(ClassIndex(Halved(), 4)) == expected(KEYS // 2, 4)[0]
    np.save(tmp_path / "keys.npy", KEYS)
    mapped = np.load(tmp_path / "keys.npy", mmap_mode="r")
    assert rows_of(ClassIndex(mapped, 7)) == expected(KEYS, 7)[0]
    assert digest_of(mapped) == digest_of(KEYS)


def test_other_keys_are_known_apart() -> None:
    other = KEYS.copy()
    other[4_321] ^= 1
    digests = {digest_of(keys) for keys in (KEYS, other, KEYS.astype(np.int8), KEYS[:-1])}
    assert len(digests) == 4


@pytest.mark.parametrize("damage", ["cut", "header", "empty"])
def test_a_damaged_file_is_made_again(damage: str, tmp_path: Path) -> None:
    whole = rows_of(ClassIndex(KEYS, 7, cache_dir=tmp_path))
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    path.unlink()
    path.write_bytes({"cut": data[:-4], "header": b"?" + data[1:], "empty": b""}[damage])
    assert rows_of(ClassIndex(KEYS, 7, cache_dir=tmp_path)) == whole


def test_bad_keys_are_named(tmp_path: Path) -> None:
    for keys, message in (
        ([0, 2, 3], "row 2 has class 3, but the classes are 0 to 2"),
        ([0, -1], "row 1 has class -1"),
        ([0.0, 1.0], "classes must be integers, one a row, got float64"),
    ):
        with pytest.raises(ConfigError, match=message):
            _ = ClassIndex(np.array(keys), 3, cache_dir=tmp_path).starts
    assert list(tmp_path.iterdir()) == [], "nothing half-made is left"


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataFileIOError, match="pass a writable folder as cache_dir="):
        _ = ClassIndex(KEYS, 7, cache_dir=tmp_path / "file").starts
    if os.getuid() == 0:
        pytest.skip("root may write anywhere")
    monkeypatch.setattr(class_index, "_SHARED_FROM", 5_000)
    shut = tmp_path / "penstock" / "classes"
    shut.mkdir(parents=True)
    shut.chmod(0o500)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.warns(UserWarning, match="4 bytes a row, cannot be stored there .* its own copy in memory"):
        assert rows_of(ClassIndex(KEYS, 7)) == expected(KEYS, 7)[0]
