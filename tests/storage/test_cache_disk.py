"""A disk that fills up shrinks the cache; it is an error only where nothing is left to remove."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from planned_uses import uses

from penstock.errors import StorageError
from penstock.storage import Cache, RemoteSource, Storage
from penstock.storage.planned_use import UsePublisher

SIZE = 200_000
DISK = 4 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB in memory."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "none", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a small file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def stored(server: Any, storage: Storage, count: int) -> list[RemoteSource]:
    urls = [server.put(f"{number}.bin", bytes([number]) * SIZE) for number in range(count)]
    return [RemoteSource(url, storage) for url in urls]


def held(cache: Cache) -> set[int]:
    return {int(entry.url.rpartition("/")[2].removesuffix(".bin")) for entry in cache.entries() if entry.complete}


def test_a_full_disk_shrinks_the_cache(server: Any, disk: Path) -> None:
    """The bound is far larger than the disk: what is due last goes, and every object is read."""
    cache = Cache(disk / "cache", max_bytes=1 << 40)
    sources = stored(server, Storage(cache=cache), 30)
    (disk / "filler").write_bytes(bytes(2 << 20))
    counts = []
    with closing(UsePublisher(cache.folder)) as future:
        future.publish(uses([source.url for source in sources], range(30), range(30), range(30, 60)))
        for _ in range(2):
            for number, source in enumerate(sources):
                assert cache.open(source).read_at(0, 1) == bytes([number])
            counts.append(len(held(cache)))
            (disk / "filler").unlink(missing_ok=True)
        assert {*range(counts[1] - 1), 29} == held(cache)
    assert counts[0] in (8, 9)
    assert counts[1] in (19, 20)
    assert cache.verify()[1] == []


def test_the_disk_fills_up_in_the_middle_of_a_download(server: Any, disk: Path) -> None:
    cache = Cache(disk / "cache", max_bytes=1 << 40)
    storage = Storage(cache=cache, attempts=2)
    sources = stored(server, storage, 5)
    for source in sources[:4]:
        cache.open(source)

    def fill(*_: Any) -> None:
        server.fault = lambda *_: None
        with (disk / "filler").open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass

    server.fault = fill
    with closing(UsePublisher(cache.folder)) as future:
        future.publish(uses([source.url for source in sources], [10, 50, 20, 30, 1], [10, 50, 20, 30, 1]))
        assert cache.open(sources[4]).read_at(0, 1) == bytes([4])
    assert held(cache) in ({0, 2, 3, 4}, {0, 2, 4})  # what was due last went, and perhaps one more for what stays free
    assert cache.verify()[1] == []


def test_nothing_is_left_to_remove(server: Any, disk: Path) -> None:
    cache = Cache(disk / "cache")
    (source,) = stored(server, Storage(cache=cache), 1)
    with (disk / "filler").open("wb") as file:
        file.write(bytes(DISK - SIZE // 2))
    for max_bytes in (None, 1 << 40):
        with pytest.raises(StorageError, match=r"the disk is full; free some space|more than the cache"):
            Cache(cache.folder, max_bytes=max_bytes).open(source)
        assert list((cache.folder / "partial").iterdir()) == []
