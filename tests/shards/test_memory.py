"""What shards cost in memory and descriptors: bounded by bytes, the same every epoch, independent of the samples."""

from __future__ import annotations

import gc
import os
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from full_run import full_only
from shard_support import make_tar

import penstock as ps
from penstock.datasets.shards import ShardDataset
from penstock.shards import ShardSet, StreamShards

MEMBER = 20_000


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three shards of 8 MB."""
    folder, found = tmp_path_factory.mktemp("shards"), []
    for k in range(3):
        members = [(f"{k}{i:05d}.{e}", bytes(MEMBER if e == "bin" else 4)) for i in range(400) for e in ("bin", "cls")]
        found.append(str(folder / f"{k}.tar"))
        Path(found[-1]).write_bytes(make_tar(members))
    return found


def peaks(source: Any, epochs: int = 4) -> list[int]:
    """The most bytes that Python's allocators held over what they held before, in each pass."""
    result = []
    for _ in range(epochs):
        gc.collect()
        tracemalloc.start()
        for _ in source:
            pass
        result.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    return result


@full_only("much memory for each", but=["500000"])
@pytest.mark.parametrize("buffer", [0, 500_000, 2_000_000])
def test_a_stream_holds_its_buffer(paths: list[str], buffer: int) -> None:
    first, *later = peaks(StreamShards(paths, buffer_bytes=buffer))
    assert first < buffer + 1_500_000  # a window of headers as arrays, and a sample
    assert max(later) < first + 100_000


def test_a_pipeline_holds_its_buffer(paths: list[str]) -> None:
    import penstock.wds as wds

    pipeline = wds.WebDataset(paths, shardshuffle=True, seed=0).shuffle(20)
    first, *later = peaks(pipeline)
    assert first < 40 * MEMBER + 2_000_000
    assert max(later) < first + 200_000


def test_random_access_holds_the_batch(paths: list[str]) -> None:
    loader = ps.DataLoader(ShardDataset(paths, seed=0), batch_size=8, collate_fn=len)
    first, *later = peaks(loader)
    assert first < 16 * 2 * MEMBER + 500_000
    assert max(later) < first + 100_000


def test_the_index_is_not_in_memory(tmp_path: Path) -> None:
    sizes = []
    for count in (100, 20_000):
        path = tmp_path / f"{count}.tar"
        path.write_bytes(make_tar((f"{i:06d}.cls", b"1") for i in range(count)))
        ShardSet([path])
        gc.collect()
        tracemalloc.start()
        shards = ShardSet([path])
        assert shards[count - 1]["cls"] == b"1"
        sizes.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
    assert sizes[1] < sizes[0] + 20_000


@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors in /proc")
def test_descriptors_are_given_back(paths: list[str]) -> None:
    def descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    stream = iter(StreamShards(paths))
    next(stream)
    assert descriptors() > before
    del stream
    assert descriptors() == before
    shards = ShardSet(paths)
    assert shards[1000]["cls"]
    del shards
    assert descriptors() == before
