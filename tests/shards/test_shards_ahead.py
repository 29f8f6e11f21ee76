"""Look-ahead over the shards of a store: hits are the part of the data that fits, whatever the shuffle."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.shards.writer import ShardWriter
from penstock.storage import Cache, Storage

SHARDS, SAMPLES, SIZE = 100, 10, 4_000


def put_shards(server: Any, folder: Path, count: int = SHARDS, *, indexed: bool = True) -> list[str]:
    with ShardWriter(str(folder / "s-%03d.tar"), maxcount=SAMPLES) as writer:
        for number in range(count * SAMPLES):
            writer.write({"__key__": f"{number:06d}", "bin": os.urandom(SIZE), "txt": str(number)})
    urls: list[str] = []
    ps.ShardSet(str(folder / "s-*.tar"))  # writes the indexes
    for path in sorted(folder.glob("s-*.tar")):
        urls.append(server.put(path.name, path.read_bytes()))
        if indexed:
            server.put(path.name + ".pidx", path.with_name(path.name + ".pidx").read_bytes())
    return urls


def asked(server: Any) -> list[tuple[str, int]]:
    """What was asked for of shards: path and bytes."""
    found = []
    for path, part in server.requests:
        if path.endswith(".tar"):
            begin, _, end = part.removeprefix("bytes=").partition("-")
            found.append((path, int(end) + 1 - int(begin)))
    return found


def epoch(loader: Any) -> list[int]:
    return [int(text) for batch in loader for text in batch["txt"]]


@pytest.mark.parametrize("fraction", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("shuffle", ["block", "global"])
def test_hits_are_the_part_that_fits(server: Any, tmp_path: Path, shuffle: str, fraction: float) -> None:
    (tmp_path / "shards").mkdir()
    urls = put_shards(server, tmp_path / "shards")
    size = (tmp_path / "shards" / "s-000.tar").stat().st_size
    index = (tmp_path / "shards" / "s-000.tar.pidx").stat().st_size
    cache = Cache(tmp_path / "cache", max_bytes=int(fraction * SHARDS * (size + 1000)) + SHARDS * (index + 1000))
    more = {"block_size": SAMPLES, "window": 1} if shuffle == "block" else {}
    dataset = ps.ShardDataset(list(urls), storage=Storage(cache=cache), decode=True, shuffle=shuffle, seed=1, **more)
    loader = ps.DataLoader(dataset, batch_size=5, num_workers=2)
    server.requests.clear()
    hits = []
    for number in range(4):
        loader.set_epoch(number)
        assert sorted(epoch(loader)) == list(range(SHARDS * SAMPLES))
        fetched = asked(server)
        server.requests.clear()
        hits.append(1 - sum(count for _, count in fetched) / SHARDS / size)
    print(shuffle, fraction, np.round(hits, 3), len(fetched))
    assert np.mean(hits[1:]) >= fraction - 0.03
