"""Writing small objects as a whole, and listing what is there with its versions."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from store_server import Store

from penstock.errors import (
    StorageAuthError,
    StorageError,
    StorageNotFoundError,
    StorageUnavailableError,
)
from penstock.storage import RemoteSource, Storage, list_objects, read_object

DATA = bytes(range(256)) * 40


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    (tmp_path / "store" / "bucket").mkdir(parents=True)
    with Store(tmp_path / "store") as made:
        yield made


def of(store: Store, **numbers: Any) -> Storage:
    return Storage({"endpoint_url": store.url, "key": "a", "secret": "b", "region_name": "us-east-1"}, **numbers)


def test_s3(s3: Any) -> None:
    storage, url = Storage(), "s3://data/shards/a b%20é.pidx"
    assert storage.put(url, DATA)
    assert s3.get_object(Bucket="data", Key="shards/a b%20é.pidx")["Body"].read() == DATA
    assert storage.put(url, b"")
    assert not storage.put(url, b"other", if_absent=True)
    assert read_object(url) == b""
    assert storage.put("s3://data/shards/b.pidx", DATA, if_absent=True)
    with pytest.raises(StorageNotFoundError, match=r"s3://no-such-bucket/a does not exist \(HTTP 404.*NoSuchBucket"):
        storage.put("s3://no-such-bucket/a", DATA)


def test_one_of_many_writers_succeeds(store: Store) -> None:
    storage, url, won = of(store), "s3://bucket/index", []
    start = threading.Barrier(8)

    def write(number: int) -> None:
        start.wait(20)
        if storage.put(url, str(number).encode(), if_absent=True):
            won.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(won) == 1
    assert storage.read(url) == str(won[0]).encode()


def test_web_servers(store: Store, server: Any) -> None:
    url = f"{store.url}/bucket/a.pidx"
    assert Storage().put(url, DATA)
    assert read_object(url) == DATA
    assert Storage().put(url + "?signature=hush", b"new")
    assert read_object(url) == b"new"
    with pytest.raises(StorageError, match=r"cannot write http.*/a\.pidx: the store does not support this"):
        Storage().put(url, DATA, if_absent=True)
    with pytest.raises(StorageError, match=r"cannot write http.*/a\.bin\?\.\.\.: HTTP 501") as caught:
        Storage().put(server.put("a.bin", DATA) + "?signature=hush", b"")
    assert "hush" not in str(caught.value)


def test_a_store_that_is_away(store: Store) -> None:
    store.behave(outage=60)
    with pytest.raises(StorageUnavailableError, match=r"cannot write s3://bucket/a: HTTP 503.*\(attempt 2"):
        of(store, attempts=2).put("s3://bucket/a", DATA)
    store.behave()
    assert of(store, attempts=2).put("s3://bucket/a", DATA)


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "a.pidx"
    assert Storage().put(path, DATA)
    assert not Storage().put(path, b"other", if_absent=True)
    assert path.read_bytes() == DATA
    assert Storage().put(f"file://{path}", b"new")
    assert Storage().put(tmp_path / "b.pidx", DATA, if_absent=True)
    assert {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)} == {"a.pidx": b"new", "b.pidx": DATA}
    with pytest.raises(StorageNotFoundError, match="its folder does not exist"):
        Storage().put(tmp_path / "none" / "a", DATA)


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_folders_of_others(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StorageAuthError, match="no permission to write"):
        Storage().put(tmp_path / "a", DATA)


def test_listings_give_versions(store: Store) -> None:
    """Then nothing is looked at again: one GET for each object that is read."""
    storage = of(store)
    for number in range(3):
        storage.put(f"s3://bucket/train/{number:03d}.tar", DATA[number:])
    storage.put("s3://bucket/train/more/003.tar", DATA)
    store.reset()
    found = list_objects("s3://bucket/train/*.tar", storage=storage)
    assert [url for url, _ in found] == [f"s3://bucket/train/{number:03d}.tar" for number in range(3)]
    assert [stat.size for _, stat in found] == [len(DATA), len(DATA) - 1, len(DATA) - 2]
    assert store.counts()["requests"] == {"GET": 1}
    sources = [RemoteSource(url, storage, stat) for url, stat in found]
    assert [source.read_at(0, 2) for source in sources] == [DATA[number : number + 2] for number in range(3)]
    assert store.counts()["requests"] == {"GET": 4}
    assert all(storage.open(url).fingerprint == stat.fingerprint for url, stat in found)
    everywhere = [url for url, _ in list_objects("s3://bucket/**/0*.tar", storage=storage)]
    assert everywhere[-1] == "s3://bucket/train/more/003.tar"
    assert len(everywhere) == 4
    assert list_objects("s3://bucket/*/more/*.tar", storage=storage)[0][0] == everywhere[-1]
