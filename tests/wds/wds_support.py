"""What the tests of wds share: shards made with `tarfile`, and ranks and workers without processes."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock import distributed


def write_tar(path: Path, members: Sequence[tuple[str, bytes]]) -> str:
    """A shard with these files."""
    with tarfile.open(path, "w") as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return str(path)


def write_shards(folder: Path, shards: int, each: int = 10) -> str:
    """Shards ``000.tar`` ... whose samples have their number in the whole set as class; returns them in braces."""
    for shard in range(shards):
        first = shard * each
        members = [
            (f"{number:06d}.{extension}", data)
            for number in range(first, first + each)
            for extension, data in (("txt", f"text {number}".encode()), ("cls", str(number).encode()))
        ]
        write_tar(folder / f"{shard:03d}.tar", members)
    return str(folder / f"{{000..{shards - 1:03d}}}.tar")


@contextmanager
def world(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> Iterator[None]:
    """This process as one rank of several."""
    with monkeypatch.context() as patch:
        patch.setenv("RANK", str(rank))
        patch.setenv("WORLD_SIZE", str(size))
        yield


@contextmanager
def worker(monkeypatch: pytest.MonkeyPatch, number: int, total: int) -> Iterator[None]:
    """This process as one worker of several."""
    from penstock.plan import shared

    info = type("Info", (), {"id": number, "num_workers": total})
    with monkeypatch.context() as patch:
        patch.setattr(distributed, "get_worker_info", lambda: info)
        patch.setattr(shared, "get_worker_info", lambda: info)
        yield


def classes(items: Any) -> list[int]:
    """The numbers of samples, of tuples of them, or of batches."""
    found: list[int] = []
    for item in items:
        value = item["cls"] if isinstance(item, dict) else item
        nested = isinstance(value, tuple) or (isinstance(value, list) and not isinstance(value[-1], int))
        value = value[-1] if nested else value
        many = hasattr(value, "__len__") and not isinstance(value, bytes) and getattr(value, "ndim", 1)
        found += [int(x) for x in value] if many else [int(value)]
    return found
