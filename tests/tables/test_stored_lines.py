"""JSON lines in a store: opened without a request, read out of copies that come in time, or by ranges."""

from __future__ import annotations

import gzip
import json
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard
from http_support import Server
from store_server import Store

import penstock as ps
from penstock.errors import ConfigError, DataFileError, LengthUnknownError, StorageChangedError
from penstock.storage import Cache, Storage

FILES, ROWS, SIZE = 12, 40, 2_000
TOTAL = FILES * ROWS


def rows_of(number: int) -> list[dict[str, Any]]:
    return [
        {"x": x, "text": random.Random(x).randbytes(SIZE // 2).hex(), "odd": ["\u00e9", None]}
        for x in range(number * ROWS, (number + 1) * ROWS)
    ]


def text_of(number: int) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows_of(number))


def framed(text: bytes) -> bytes:
    """Compress text in frames of a quarter each, which need not end with a row."""
    size = len(text) // 4 + 1
    return b"".join(zstandard.compress(text[begin : begin + size]) for begin in range(0, len(text), size))


KINDS = {"jsonl": bytes, "jsonl.zst": framed, "jsonl.gz": gzip.compress}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: Any) -> None:
    """Where nobody has indexed anything."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    for kind, packed in KINDS.items():
        folder = tmp_path / "store" / "bucket" / kind.replace(".", "-")
        folder.mkdir(parents=True)
        for number in range(FILES):
            (folder / f"p-{number:03d}.{kind}").write_bytes(packed(text_of(number)))
    with Store(tmp_path / "store") as store:
        yield store


@pytest.fixture
def web() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(10)


def storage_of(store: Store, place: Path, files: float = 100) -> Storage:
    """A storage whose cache has room for so many plain files."""
    options = {"endpoint_url": store.url, "key": "any", "secret": "any", "region": "us-east-1"}
    return Storage(options=options, cache=Cache(place, max_bytes=int(files * len(text_of(0)))))


def url_of(kind: str) -> str:
    return f"s3://bucket/{kind.replace('.', '-')}/p-*.{kind}"


def number(row: dict[str, Any]) -> int:
    assert row["text"] == random.Random(row["x"]).randbytes(SIZE // 2).hex()
    return int(row["x"])


def loader_of(source: Any, storage: Storage | None = None, *, workers: int = 0, **options: Any) -> ps.DataLoader[Any]:
    dataset = ps.TableDataset(source, storage=storage, **{"seed": 3, "load": number, **options})
    return ps.DataLoader(dataset, batch_size=8, num_workers=workers)


def epoch(loader: Any) -> list[int]:
    return [x for batch in loader for x in batch.tolist()]


def requests(store: Store) -> int:
    return int(sum(store.counts()["requests"].values()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, 2])
def test_opening_lists_and_each_file_comes_once(store: Store, tmp_path: Path, kind: str, workers: int) -> None:
    loader = loader_of(url_of(kind), storage_of(store, tmp_path / "cache"), workers=workers)
    assert requests(store) == 1
    local = loader_of(str(tmp_path / "store" / "bucket" / kind.replace(".", "-") / "p-*"))
    assert sorted(epoch(loader)) == list(range(TOTAL))
    assert len(loader) == len(local)
    assert requests(store) == 1 + FILES
    loader.set_epoch(1)
    local.set_epoch(1)
    assert epoch(loader) == epoch(local)
    assert requests(store) == 1 + FILES
    loader.close()


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.zst"])
@pytest.mark.parametrize("shuffle", ["global", "block", "none"])
def test_a_small_cache(store: Store, tmp_path: Path, kind: str, shuffle: str) -> None:
    """Copies that fit are kept, of the rest rows or frames are read by ranges, or copies come and go."""
    size = sum(path.stat().st_size for path in (tmp_path / "store" / "bucket" / kind.replace(".", "-")).iterdir())
    storage = storage_of(store, tmp_path / "cache", size / 2 / len(text_of(0)))
    loader = loader_of(url_of(kind), storage, shuffle=shuffle, cache_bytes=1, window_shards=2)
    fetched = []
    for number in range(4):
        loader.set_epoch(number)
        store.reset()
        assert sorted(epoch(loader)) == list(range(TOTAL))
        fetched.append(store.counts()["bytes"])
    if kind == "jsonl" and shuffle == "global":
        # 5 of 12 files are kept. Few of the other rows lie so near to each other that they come together.
        assert all(one < 0.75 * size for one in fetched[2:])
    loader.close()
    assert sum(entry.stored for entry in storage.the_cache().entries()) <= storage.the_cache().limit()


@pytest.mark.parametrize("attempt", range(6))
def test_a_cache_for_three_windows_is_enough(store: Store, tmp_path: Path, attempt: int) -> None:
    """What is read, and the two windows behind it, are there at a time: nothing goes that is needed again."""
    loader = loader_of(url_of("jsonl"), storage_of(store, tmp_path / "cache", 7.2), window_shards=2)
    store.reset()
    assert sorted(epoch(loader)) == list(range(TOTAL))
    assert store.counts()["requests"] == {"GET": FILES}


def test_a_file_that_fits_no_cache_is_read_by_ranges(store: Store, tmp_path: Path) -> None:
    plenty = loader_of(ps.JsonFiles(url_of("jsonl"), storage=storage_of(store, tmp_path / "a")), shuffle="none")
    assert epoch(plenty) == list(range(TOTAL))
    store.reset()
    none = storage_of(store, tmp_path / "b", 0.5)
    loader = loader_of(ps.JsonFiles(url_of("jsonl"), storage=none), shuffle="none")
    assert store.counts()["bytes"] < 3 * len(text_of(0))  # the indexes are known, and the first rows are looked at
    store.reset()
    table = loader.dataset.source
    assert table.records(range(2 * ROWS)) == rows_of(0) + rows_of(1)
    # Rows that lie one after the other come together.
    assert store.counts()["requests"] == {"GET": 2}
    assert store.counts()["bytes"] == len(text_of(0)) + len(text_of(1))
    assert [row["x"] for row in table.records([TOTAL - 1, 0, TOTAL - 1])] == [TOTAL - 1, 0, TOTAL - 1]
    assert epoch(loader) == list(range(TOTAL))


def test_what_was_indexed_once_is_opened_without_its_data(store: Store, tmp_path: Path) -> None:
    storage = storage_of(store, tmp_path / "cache")
    first = ps.JsonFiles(url_of("jsonl"), storage=storage)
    assert first[TOTAL - 1] == rows_of(FILES - 1)[-1]
    storage.the_cache().clear()
    store.reset()
    again = ps.JsonFiles(url_of("jsonl"), columns=["x"], storage=storage)
    assert again.fingerprint == first.fingerprint
    assert requests(store) == 2  # the list, and the first rows
    assert again[-1] == {"x": TOTAL - 1}


def test_rows_that_are_no_rows_are_named(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "store" / "bucket" / "jsonl" / "p-007.jsonl"
    lines = text_of(7).splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:5], b"[1]\n", *lines[6:]]))
    storage = storage_of(store, tmp_path / "cache")
    with pytest.raises(DataFileError, match=r"s3://bucket/jsonl/p-007\.jsonl, line 6: expected a JSON object"):
        epoch(loader_of(url_of("jsonl"), storage))
    table = ps.JsonFiles(url_of("jsonl"), storage=storage)  # their indexes are known from here on
    begin = sum(map(len, lines[:5]))
    without_copies = ps.JsonFiles(url_of("jsonl"), storage=storage_of(store, tmp_path / "other", 0.5))
    for files, where in ((table, "line 6"), (without_copies, f"the line at byte {begin:,}")):
        with pytest.raises(DataFileError, match=rf"s3://bucket/jsonl/p-007\.jsonl, {where}: expected a JSON object"):
            files[7 * ROWS + 5]


@pytest.mark.parametrize("kind", KINDS)
def test_a_truncated_file_is_named(store: Store, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "store" / "bucket" / kind.replace(".", "-") / f"p-007.{kind}"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataFileError, match=r"p-007\.jsonl.*truncated"):
        epoch(loader_of(url_of(kind), storage_of(store, tmp_path / "cache")))


def test_a_column_that_is_not_there(store: Store, tmp_path: Path) -> None:
    dataset = ps.TableDataset(url_of("jsonl"), columns=["x", "y"], storage=storage_of(store, tmp_path / "cache"))
    with pytest.raises(DataFileError, match=r"p-\d+\.jsonl, line \d+: no key 'y'; there are x, text, odd"):
        next(iter(ps.DataLoader(dataset, batch_size=8)))
    for columns in ([], ["x", "x"], "x"):
        with pytest.raises(ConfigError, match="columns="):
            ps.TableDataset(url_of("jsonl"), columns=columns, storage=storage_of(store, tmp_path / "cache"))


def test_a_file_that_is_replaced_is_named(store: Store, tmp_path: Path) -> None:
    plenty = storage_of(store, tmp_path / "cache")
    loader = loader_of(url_of("jsonl"), plenty)
    assert sorted(epoch(loader)) == list(range(TOTAL))
    loader.close()
    plenty.the_cache().clear()
    for number in range(FILES):
        (tmp_path / "store" / "bucket" / "jsonl" / f"p-{number:03d}.jsonl").write_bytes(text_of(number + 1))
    for files in (100, 0.5):
        with pytest.raises(StorageChangedError, match=r"p-0\d\d\.jsonl changed"):
            loader.dataset.table.whole.maps._open._open.clear()
            plenty.the_cache().max_bytes = int(files * len(text_of(0)))
            epoch(loader)


def test_addresses_are_not_shown_with_their_signatures(web: Server, tmp_path: Path) -> None:
    url = web.put("a.jsonl", b'{"x": 1}\nno JSON\n') + "?X-Amz-Signature=secret"
    storage = Storage(cache=Cache(tmp_path / "cache"))
    with pytest.raises(DataFileError, match="line 2: not JSON") as info:
        epoch(loader_of(url, storage, load=None))
    assert "secret" not in str(info.value)
    with pytest.raises(DataFileError, match="line 2: not JSON") as info:
        ps.JsonFiles(url, storage=storage)
    assert "secret" not in str(info.value)


def test_what_needs_the_number_of_rows_says_so(store: Store, tmp_path: Path) -> None:
    dataset = ps.TableDataset(url_of("jsonl"), storage=storage_of(store, tmp_path / "cache"))
    for ask in (
        lambda: dataset.filtered(range(3)),
        lambda: ps.Mixture([(dataset, 1)]),
        lambda: ps.PackedDataset(dataset, 64, lengths=[5] * TOTAL),
    ):
        with pytest.raises(LengthUnknownError, match=r"TableDataset\(JsonFiles"):
            ask()
    with pytest.raises(ConfigError, match=r"TableDataset\(JsonFiles"):
        ps.TableDataset(url_of("jsonl"), storage=storage_of(store, tmp_path / "cache"), mini_epochs=2)
    with pytest.raises(ConfigError, match="window_shards"):
        ps.TableDataset(url_of("jsonl"), window_shards=0)


def test_it_is_open_by_its_address(store: Store, tmp_path: Path) -> None:
    dataset: Any = ps.open(url_of("jsonl.zst"), storage=storage_of(store, tmp_path / "cache"))
    assert repr(dataset).startswith("TableDataset of <12 shards, 12 not counted yet: s3://bucket/")
    assert dataset.table.columns is None
    assert len(list(ps.DataLoader(dataset, batch_size=None))) == TOTAL
    assert dataset.table.columns == ["x", "text", "odd"]
    assert repr(dataset).startswith("TableDataset of <JsonFiles of 480 rows: x, text, odd; s3://bucket/")
