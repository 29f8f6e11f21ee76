"""Stores that are read in fsspec's own way, by the one that it keeps in memory."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from busy_support import HANG

from penstock.errors import (
    StorageAuthError,
    StorageChangedError,
    StorageError,
    StorageNotFoundError,
    StorageUnavailableError,
)
from penstock.storage import Storage, local_path, open_source, read_object

fsspec = pytest.importorskip("fsspec")
DATA = os.urandom((9 << 20) + 7)


@pytest.fixture
def memory() -> Iterator[Any]:
    system = fsspec.filesystem("memory")
    system.pipe("/bucket/a.bin", DATA)
    yield system
    system.store.clear()


def test_reading(memory: Any, tmp_path: Path) -> None:
    source = open_source("memory://bucket/a.bin")
    assert source.size == len(DATA)
    assert source.read_at(3, 9) == DATA[3:12]
    assert source.stream().read() == read_object("memory://bucket/a.bin") == DATA
    assert Path(local_path("memory://bucket/a.bin", cache=tmp_path)).read_bytes() == DATA


def test_changes_and_what_is_not_there(memory: Any) -> None:
    source = open_source("memory://bucket/a.bin")
    time.sleep(0.01)
    memory.pipe("/bucket/a.bin", bytes(len(DATA)))
    with pytest.raises(StorageChangedError, match="it was modified at"):
        source.read_at(0, 5)
    with pytest.raises(StorageNotFoundError, match="memory://bucket/none does not exist"):
        open_source("memory://bucket/none")
    with pytest.raises(StorageNotFoundError, match="is a folder"):
        open_source("memory://bucket")


def test_patterns(memory: Any) -> None:
    memory.pipe("/bucket/b.bin", b"b")
    assert Storage().glob("memory://bucket/*.bin") == ["memory:///bucket/a.bin", "memory:///bucket/b.bin"]
    assert read_object(Storage().glob("memory://bucket/b*")[0]) == b"b"


def test_failures(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    storage, hasty = Storage(attempts=3, deadline=HANG), Storage(attempts=3, deadline=0.6)
    source = storage.open("memory://bucket/a.bin")
    store: Any = storage.store_of("memory://bucket/a.bin")
    real, left, go_on = store._fs.cat_file, [ConnectionResetError("gone"), "short"], threading.Event()

    def failing(path: str, begin: int | None = None, end: int | None = None) -> bytes:
        what = left.pop(0) if left else None
        if isinstance(what, Exception):
            raise what
        if what == "hang":
            go_on.wait(HANG)
        data: bytes = real(path, begin, end)
        return data[:1000] if what == "short" else data

    monkeypatch.setattr(store._fs, "cat_file", failing)
    assert hasty.store_of("memory://bucket/a.bin")._fs is store._fs  # type: ignore[attr-defined]
    assert source.read_at(5, 5000) == DATA[5:5005]
    left += [PermissionError("no")]
    with pytest.raises(StorageAuthError, match="access refused"):
        source.read_at(5, 5000)
    left += [OSError("a"), OSError("b"), OSError("c")]
    with pytest.raises(StorageUnavailableError, match=r"OSError: c \(attempt 3"):
        source.read_at(5, 5000)
    left += ["hang"]
    with pytest.raises(StorageUnavailableError, match=r"not done in 0\.6 s"):
        hasty.open("memory://bucket/a.bin").read_at(5, 5000)
    go_on.set()


def test_stores_that_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.delenv("AIS_ENDPOINT", raising=False)
    with pytest.raises(StorageError, match="set AIS_ENDPOINT"):
        open_source("ais://bucket/key")
    monkeypatch.setitem(sys.modules, "obstore", None)
    for url in ("az://container/key", "http://127.0.0.1/key"):
        with pytest.raises(
            StorageError, match=r"(az|http):// needs the package obstore: pip install 'penstock\[cloud\]'"
        ):
            Storage(idle=28).open(url)  # an option of its own, so that a store of its own is made
    with pytest.raises(StorageError, match="nowhere://"):
        open_source("nowhere://a/b")
    text = "install it by other means"
    fsspec.register_implementation("unpaid", "penstock_missing_package.core.Files", clobber=True, errtxt=text)
    with pytest.raises(StorageError, match=r"unpaid:// needs the package penstock_missing_package: pip install pen"):
        open_source("unpaid://a/b")


def test_aistore_by_its_gateway(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    url = server.put("v1/objects/bucket/a/b.tar", DATA)
    monkeypatch.setenv("AIS_ENDPOINT", url.partition("/v1/")[0])
    assert read_object("ais://bucket/a/b.tar") == DATA
    assert local_path("ais://bucket/a/b.tar").endswith("/b.tar")
