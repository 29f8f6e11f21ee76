"""Parquet in a store: opened by footers, read out of copies that come in time, or by ranges."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from busy_support import HANG
from store_server import Store

import penstock as ps
from penstock.errors import DataFileChangedError, DataFileError, StorageChangedError
from penstock.storage import Cache, Storage

FILES, ROWS, SIZE = 12, 20, 5_000


def write(folder: Path, numbers: range = range(FILES), *, seed: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number in numbers:
        values = range(number * ROWS, (number + 1) * ROWS)
        table = pa.table({"x": [seed + value for value in values], "data": [os.urandom(SIZE) for _ in values]})
        pq.write_table(table, folder / f"p-{number:03d}.parquet", row_group_size=ROWS // 2, compression="none")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    write(tmp_path / "store" / "bucket")
    with Store(tmp_path / "store") as store:
        yield store


def storage_of(store: Store, place: Path, files: float = 100) -> Storage:
    """A storage whose cache has room for so many files."""
    options = {"endpoint_url": store.url, "key": "any", "secret": "any", "region": "us-east-1"}
    return Storage(options=options, cache=Cache(place, max_bytes=int(files * (ROWS * SIZE + 8_000))))


def requests(store: Store) -> int:
    return int(sum(store.counts()["requests"].values()))


def loader_of(source: Any, storage: Storage | None = None, *, workers: int = 0, **options: Any) -> ps.DataLoader[Any]:
    options = {"seed": 3, "columns": ["x"], **options}
    return ps.DataLoader(ps.TableDataset(source, storage=storage, **options), batch_size=8, num_workers=workers)


def epoch(loader: Any) -> list[int]:
    return [x for batch in loader for x in batch["x"].tolist()]


URL = "s3://bucket/p-*.parquet"


@pytest.mark.parametrize("workers", [0, 2])
def test_opening_reads_footers_and_each_file_comes_once(store: Store, tmp_path: Path, workers: int) -> None:
    loader = loader_of(URL, storage_of(store, tmp_path / "cache"), workers=workers)
    assert requests(store) == 1 + FILES
    assert store.counts()["bytes"] < 0.2 * FILES * ROWS * SIZE
    local = loader_of(str(tmp_path / "store" / "bucket" / "p-*.parquet"))
    for number in range(2):
        for one in (loader, local):
            one.set_epoch(number)
        assert epoch(loader) == epoch(local)
        assert requests(store) == 1 + 2 * FILES
    loader.close()


@pytest.mark.parametrize("shuffle", ["global", "block"])
def test_a_small_cache(store: Store, tmp_path: Path, shuffle: str) -> None:
    """A half of the data is kept, whatever the shuffle; of the rest ranges are read, or copies come and go."""
    cache = storage_of(store, tmp_path / "cache", FILES / 2)
    loader = loader_of(URL, cache, shuffle=shuffle, cache_bytes=1)
    for number in range(3):
        loader.set_epoch(number)
        store.reset()
        assert sorted(epoch(loader)) == list(range(FILES * ROWS))
        objects = store.counts()["objects"]
        copied = [key for key, found in objects.items() if found["bytes"] >= ROWS * SIZE]
        if shuffle == "block":
            assert number == 0 or len(copied) <= FILES / 2 + 2
        assert sum(entry.size for entry in cache.the_cache().entries()) <= cache.the_cache().limit()
    loader.close()


def test_a_state_fits_copies_and_ranges(store: Store, tmp_path: Path) -> None:
    plenty, none = storage_of(store, tmp_path / "a"), storage_of(store, tmp_path / "b", 0.5)
    for first, then in ((plenty, none), (none, plenty)):
        loader = loader_of(URL, first)
        expected = epoch(loader)
        iterator = iter(loader)
        loader.set_epoch(0)
        iterator = iter(loader)
        had = [x for _ in range(5) for x in next(iterator)["x"].tolist()]
        state = loader.state_dict()
        loader.close()
        again = loader_of(URL, then)
        again.load_state_dict(state)
        assert had + epoch(again) == expected
        again.close()


def test_a_file_that_is_replaced_is_named(store: Store, tmp_path: Path) -> None:
    for files in (100, 0.5):
        table = ps.TableFiles(URL, columns=["x"], storage=storage_of(store, tmp_path / str(files), files))
        write(tmp_path / "store" / "bucket", range(2, 3), seed=1_000_000)
        with pytest.raises(StorageChangedError, match=r"p-002\.parquet changed"):
            table.records([2 * ROWS])
        assert table.records([ROWS]) == [{"x": ROWS}]


def _read(pickled: bytes, found: Any) -> None:
    table = pickle.loads(pickled)
    found.put([row["x"] for row in table.records([5, 100, 239])])


def test_another_process_looks_nothing_up(store: Store, tmp_path: Path) -> None:
    table = ps.TableFiles(URL, columns=["x"], storage=storage_of(store, tmp_path / "cache"))
    assert len(table) == FILES * ROWS
    table.records([5, 100, 239])
    store.reset()
    context = multiprocessing.get_context("spawn")
    found = context.Queue()
    process = context.Process(target=_read, args=(pickle.dumps(table), found))
    process.start()
    assert found.get(timeout=HANG) == [5, 100, 239]
    process.join(HANG)
    assert requests(store) == 0


def test_copies_that_the_cache_removed_are_let_go(store: Store, tmp_path: Path) -> None:
    """Else their bytes would stay on the disk."""
    storage = storage_of(store, tmp_path / "cache", 2)
    table = ps.TableFiles(URL, columns=["x"], storage=storage)
    for number in range(FILES):
        assert table.records([number * ROWS]) == [{"x": number * ROWS}]
    maps = Path("/proc/self/maps").read_text()
    assert len({line.split()[4] for line in maps.splitlines() if str(storage.the_cache().folder) in line}) <= 3


def test_a_copy_that_somebody_truncates(store: Store, tmp_path: Path) -> None:
    table = ps.TableFiles(URL, columns=["x"], storage=storage_of(store, tmp_path / "cache"))
    assert table.records([3]) == [{"x": 3}]
    (copy,) = (tmp_path / "cache").glob("objects/*/*.parquet")
    os.truncate(copy, 100)
    with pytest.raises(DataFileChangedError, match=r"p-000\.parquet was changed"):
        table.records([3])


def test_a_truncated_file_is_named(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "store" / "bucket" / "p-007.parquet"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataFileError, match=r"p-007\.parquet"):
        ps.TableFiles(URL, storage=storage_of(store, tmp_path / "cache"))


def test_files_that_no_store_lists(store: Store, tmp_path: Path) -> None:
    """Their versions are looked up beside each other."""
    urls = [f"{store.url}/bucket/p-{number:03d}.parquet" for number in range(FILES)]
    table = ps.TableFiles(urls, columns=["x"], storage=Storage(cache=tmp_path / "cache"))
    assert requests(store) == 2 * FILES
    assert [row["x"] for row in table.records(range(50))] == list(range(50))


def test_arrow_files_are_copied_when_they_are_opened(store: Store, tmp_path: Path) -> None:
    for number in range(6):
        with pa.OSFile(str(tmp_path / "store" / "bucket" / f"a-{number}.arrow"), "wb") as sink:
            batch = pa.record_batch({"x": [number]})
            with pa.ipc.new_file(sink, batch.schema) as writer:
                writer.write(batch)
    table = ps.TableFiles("s3://bucket/a-*.arrow", storage=storage_of(store, tmp_path / "cache"))
    before = requests(store)
    assert [row["x"] for row in table.records(range(6))] == list(range(6))
    assert requests(store) == before


def test_filters_of_objects_of_one_size_and_second_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "store" / "bucket").mkdir(parents=True)
    for name, values in (("a", range(1000)), ("b", range(999, -1, -1))):
        path = tmp_path / "store" / "bucket" / f"{name}.parquet"
        pq.write_table(pa.table({"x": values}), path, compression="none", use_dictionary=False)
        os.utime(path, (1e9, 1e9))
    with Store(tmp_path / "store", etags=False) as store:
        for name in "ab":
            table = ps.TableDataset(f"{store.url}/bucket/{name}.parquet", rank=0, world_size=1, shuffle="none")
            assert [row["x"] for row in ps.Subset(table, pc.field("x") < 3)] == (
                [0, 1, 2] if name == "a" else [2, 1, 0]
            )
