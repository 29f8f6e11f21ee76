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


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(0, 20), max_size=60), st.sampled_from([np.uint8, np.int16, np.uint64]), st.integers(21, 300)
)
def test_it_is_a_stable_sort(keys: list[int], dtype: type, count: int) -> None:
    index = ClassIndex.open(np.array(keys, dtype=dtype), count)
    assert (index.rows.tolist(), index.starts.tolist()) == expected(keys, count)
    assert index.sizes.sum() == len(index) == len(keys)
    rows = np.arange(len(keys))
    assert index.rows[index.find(rows, np.array(keys, dtype=np.int64))].tolist() == rows.tolist()


def test_the_file_has_what_memory_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(class_index, "_CHUNK", 333)  # so that a class grows over many chunks
    index = ClassIndex.open(KEYS, 9, cache_dir=tmp_path)
    assert (index.rows.tolist(), index.starts.tolist()) == expected(KEYS, 9)
    assert index.path is not None
    assert index.rows.dtype == np.uint32
    assert not index.rows.flags.writeable
    made = index.path.stat()
    again = ClassIndex.open(KEYS, 9, cache_dir=tmp_path)
    assert again.rows.tolist() == index.rows.tolist()
    assert index.path.stat().st_mtime_ns == made.st_mtime_ns, "it is made once"
    assert [path.name for path in tmp_path.iterdir()] == [index.path.name]


def test_large_tables_are_mapped_and_pickle_as_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(class_index, "_SHARED_FROM", 5_000)
    index = ClassIndex.open(KEYS, 7)
    assert index.path is not None
    assert index.path.parent == Path(os.environ["XDG_CACHE_HOME"]) / "penstock" / "classes"
    pickled = pickle.dumps(index)
    assert len(pickled) < 1_000
    assert pickle.loads(pickled).rows.tolist() == index.rows.tolist()
    index.path.unlink()
    with pytest.raises(DataFileIOError, match="create the sampler or dataset again"):
        pickle.loads(pickled)
    small = pickle.loads(pickle.dumps(ClassIndex.open(KEYS[:100], 7)))
    assert small.rows.tolist() == expected(KEYS[:100], 7)[0]


def test_keys_may_be_anything_with_slices(tmp_path: Path) -> None:
    class Halved:
        def __len__(self) -> int:
            return len(KEYS)

        def __getitem__(self, part: slice) -> Any:
            return KEYS[part] // 2

    assert ClassIndex.open(Halved(), 4).rows.tolist() == expected(KEYS // 2, 4)[0]
    np.save(tmp_path / "keys.npy", KEYS)
    mapped = np.load(tmp_path / "keys.npy", mmap_mode="r")
    assert ClassIndex.open(mapped, 7).rows.tolist() == expected(KEYS, 7)[0]
    assert digest_of(mapped) == digest_of(KEYS)


def test_other_keys_are_known_apart() -> None:
    other = KEYS.copy()
    other[4_321] ^= 1
    digests = {digest_of(keys) for keys in (KEYS, other, KEYS.astype(np.int8), KEYS[:-1])}
    assert len(digests) == 4


@pytest.mark.parametrize("damage", ["cut", "header", "empty"])
def test_a_damaged_file_is_made_again(damage: str, tmp_path: Path) -> None:
    index = ClassIndex.open(KEYS, 7, cache_dir=tmp_path)
    path, whole = index.path, index.rows.tolist()
    assert path is not None
    del index
    data = path.read_bytes()
    path.unlink()
    path.write_bytes({"cut": data[:-4], "header": b"?" + data[1:], "empty": b""}[damage])
    assert ClassIndex.open(KEYS, 7, cache_dir=tmp_path).rows.tolist() == whole


def test_bad_keys_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="row 2 has class 3, but the classes are 0 to 2"):
        ClassIndex.open(np.array([0, 2, 3]), 3, cache_dir=tmp_path)
    with pytest.raises(ConfigError, match="row 1 has class -1"):
        ClassIndex.open(np.array([0, -1]), 3)
    with pytest.raises(ConfigError, match="classes must be integers, one a row, got float64"):
        ClassIndex.open(np.array([0.0, 1.0]), 3)
    with pytest.raises(ConfigError, match="row 1 is not in the given class"):
        ClassIndex.open(np.array([0, 2, 1]), 3).find(np.array([0, 1]), np.array([0, 0]))
    assert list(tmp_path.iterdir()) == [], "nothing half-made is left"


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataFileIOError, match="pass a writable folder as cache_dir="):
        ClassIndex.open(KEYS, 7, cache_dir=tmp_path / "file")
    if os.getuid() == 0:
        pytest.skip("root may write anywhere")
    monkeypatch.setattr(class_index, "_SHARED_FROM", 5_000)
    shut = tmp_path / "penstock" / "classes"
    shut.mkdir(parents=True)
    shut.chmod(0o500)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.warns(UserWarning, match="its own copy in memory, 4 bytes a row"):
        index = ClassIndex.open(KEYS, 7)
    assert index.rows.tolist() == expected(KEYS, 7)[0]
