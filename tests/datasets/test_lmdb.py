"""LMDB as a source: keys make a manifest, values are loaded by key."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from interpreter_support import METHODS

import penstock as ps
from penstock.datasets.lmdb import LoadLmdb, write_keys
from penstock.errors import ManifestError, ManifestIOError

lmdb = pytest.importorskip("lmdb")


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "data.lmdb"
    with lmdb.open(str(path), map_size=1 << 24) as environment, environment.begin(write=True) as transaction:
        for i in range(100):
            transaction.put(f"a key {i:03d}".encode(), bytes([i]))
    return path


def first_byte(key: str, value: bytes) -> tuple[str, int]:
    return key, value[0]


def test_every_value_once_in_any_worker(database: Path, tmp_path: Path) -> None:
    assert write_keys(database, tmp_path / "keys.txt") == 100
    manifest = ps.Manifest.open(tmp_path / "keys.txt", label=None)
    dataset = ps.RankDataset(manifest, rank=0, world_size=1, load=LoadLmdb(database, decode=first_byte))
    assert dataset[0][0].startswith("a key ")  # opened here, then in workers that are forked and that unpickle it
    for context in ("fork", METHODS[-1]):
        loader = torch.utils.data.DataLoader(dataset, batch_size=7, num_workers=2, multiprocessing_context=context)
        items = [item for keys, values in loader for item in zip(keys, values.tolist(), strict=True)]
        assert sorted(items) == [(f"a key {i:03d}", i) for i in range(100)]


def test_default_item_is_key_and_bytes(database: Path, tmp_path: Path) -> None:
    write_keys(database, tmp_path / "keys.txt")
    manifest = ps.Manifest.open(tmp_path / "keys.txt", label=None)
    load = pickle.loads(pickle.dumps(LoadLmdb(database)))
    assert load(manifest[3]) == ("a key 003", b"\x03")


def test_missing_key_and_missing_database(database: Path, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("no such key\n")
    record = ps.Manifest.open(tmp_path / "other.txt", label=None)[0]
    with pytest.raises(ManifestError, match=r"no key 'no such key' \(row 0"):
        LoadLmdb(database)(record)
    with pytest.raises(ManifestIOError, match="cannot be opened as an LMDB database"):
        write_keys(tmp_path / "nothing.lmdb", tmp_path / "keys.txt")
    assert not (tmp_path / "keys.txt").exists()


def test_key_with_a_line_break_is_refused(database: Path, tmp_path: Path) -> None:
    with lmdb.open(str(database), map_size=1 << 24) as environment, environment.begin(write=True) as transaction:
        transaction.put(b"two\nlines", b"")
    with pytest.raises(ManifestError, match="line break"):
        write_keys(database, tmp_path / "keys.txt")
    assert not (tmp_path / "keys.txt").exists()


@pytest.mark.parametrize("key", [b" a", b"a ", b"\ta", b" ", b"\xef\xbb\xbfa"])
def test_a_key_that_a_manifest_changes_is_refused(database: Path, tmp_path: Path, key: bytes) -> None:
    with lmdb.open(str(database), map_size=1 << 24) as environment, environment.begin(write=True) as transaction:
        transaction.put(key, b"")
    with pytest.raises(ManifestError, match="begins or ends with a space"):
        write_keys(database, tmp_path / "keys.txt")
    assert not (tmp_path / "keys.txt").exists()
