"""Indexes that are written beside shards in a store: by a job that reads them, and by the command."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from full_run import full_only
from shards_support import COUNTS, number, write_shards
from store_server import Store

import penstock as ps
from penstock.errors import ConfigError, StorageAuthError
from penstock.shards import ShardSet
from penstock.storage import Cache, Storage

NAMES = [f"s-{number}.tar.pidx" for number in range(len(COUNTS))]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    write_shards(tmp_path / "store" / "data")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    with Store(tmp_path / "store") as store:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "any")
        monkeypatch.setenv("AWS_ENDPOINT_URL", store.url)
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        yield store


def storage_of(store: Store, place: Path) -> Storage:
    options = {"endpoint_url": store.url, "key": "any", "secret": "any"}
    return Storage(options=options, cache=Cache(place / "cache"))


def dataset(store: Store, place: Path, **options: Any) -> ps.ShardDataset:
    storage = storage_of(store, place)
    options = {"load": number, "window_shards": 2, **options}
    return ps.ShardDataset("s3://data/s-*.tar", storage=storage, cache_dir=place / "indexes", **options)


def indexes(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "store" / "data").glob("*.pidx"))


def flat(loader: Any) -> list[int]:
    return [n for batch in loader for n in batch.tolist()]


def test_a_job_writes_indexes_and_the_next_has_a_length(store: Store, tmp_path: Path) -> None:
    first = flat(ps.DataLoader(dataset(store, tmp_path / "a", write_index=True), batch_size=3))
    assert sorted(first) == list(range(sum(COUNTS)))
    assert indexes(tmp_path) == NAMES
    other = dataset(store, tmp_path / "b", write_index=True)
    assert len(other) == sum(COUNTS)
    assert sorted(flat(ps.DataLoader(other, batch_size=3))) == list(range(sum(COUNTS)))
    # By ranges, too: they are the indexes of these shards.
    assert len(ShardSet("s3://data/s-*.tar", copy=False, storage=storage_of(store, tmp_path / "c"))) == sum(COUNTS)


def test_a_job_that_was_cut_off_leaves_some(store: Store, tmp_path: Path) -> None:
    expected = flat(ps.DataLoader(dataset(store, tmp_path / "a", write_index=True), batch_size=3))
    for name in NAMES[2:5]:
        (tmp_path / "store" / "data" / name).unlink()
    store.reset()
    rest = dataset(store, tmp_path / "b", write_index=True)
    assert store.counts()["bytes"] < 20_000  # indexes, and no shard
    assert flat(ps.DataLoader(rest, batch_size=3)) == expected
    assert indexes(tmp_path) == NAMES


def test_opening_reads_no_more_of_an_index_than_its_header(store: Store, tmp_path: Path) -> None:
    flat(ps.DataLoader(dataset(store, tmp_path / "a", write_index=True), batch_size=3))
    store.reset()
    opened = dataset(store, tmp_path / "b")
    assert len(opened) == sum(COUNTS)
    found = store.counts()
    # A list, two looks whether there are indexes, and the headers.
    assert sum(found["requests"].values()) == 1 + 2 + len(COUNTS)
    indexes = sum(one["bytes"] for key, one in found["objects"].items() if key.endswith(".pidx"))
    assert indexes == 2 * 1 + 128 * len(COUNTS)
    # What is copied needs no more of them.
    assert sorted(flat(ps.DataLoader(opened, batch_size=3))) == list(range(sum(COUNTS)))
    assert sum(store.counts()["requests"].values()) == 1 + 2 + len(COUNTS) + sum(count > 0 for count in COUNTS)


def test_ranks_without_a_process_group_may_begin_at_any_time(store: Store, tmp_path: Path) -> None:
    found: list[int] = []
    for rank in range(2):
        share = {"rank": rank, "world_size": 2, "remainder": "uneven"}
        found += flat(ps.DataLoader(dataset(store, tmp_path / str(rank), write_index=True, **share), batch_size=3))
        assert indexes(tmp_path) == NAMES
    assert sorted(found) == list(range(sum(COUNTS)))


def test_nothing_is_written_unless_asked(store: Store, tmp_path: Path) -> None:
    flat(ps.DataLoader(dataset(store, tmp_path / "a"), batch_size=3))
    assert indexes(tmp_path) == []


def test_a_store_that_takes_nothing_says_so(store: Store, tmp_path: Path) -> None:
    store.behave(refuse=403)
    with pytest.raises(StorageAuthError, match=r"s-\d\.tar\.pidx"):
        flat(ps.DataLoader(dataset(store, tmp_path / "a", write_index=True), batch_size=3))


def test_options_that_go_together(tmp_path: Path) -> None:
    write_shards(tmp_path / "data")
    with pytest.raises(ConfigError, match="write_index"):
        ps.ShardDataset(str(tmp_path / "data" / "s-*.tar"), write_index=True)
    with pytest.raises(ConfigError, match="write_index"):
        ps.ShardDataset(ShardSet(str(tmp_path / "data" / "s-*.tar")), write_index=True)


def index(*options: str) -> dict[str, Any]:
    """Run the command in a process of its own, which reads the environment anew."""
    command = [sys.executable, "-m", "penstock", "shards", "index", "s3://data/s-*.tar", "--json", *options]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def test_the_command_goes_on_where_it_was(store: Store, tmp_path: Path) -> None:
    found = index()
    assert (found["written_to_store"], found["samples"]) == (len(COUNTS), sum(COUNTS))
    assert indexes(tmp_path) == NAMES
    (tmp_path / "store" / "data" / NAMES[3]).unlink()
    found = index()
    assert (found["written_to_store"], found["samples"]) == (1, sum(COUNTS))
    assert indexes(tmp_path) == NAMES


@full_only("two programs")
def test_the_command_survives_a_kill(store: Store, tmp_path: Path) -> None:
    store.behave(latency=0.05, rate=100_000.0)
    command = [sys.executable, "-m", "penstock", "shards", "index", "s3://data/s-*.tar", "--json"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 60
        while not indexes(tmp_path):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
    store.behave()
    index()
    assert indexes(tmp_path) == NAMES
    assert len(dataset(store, tmp_path / "a")) == sum(COUNTS)
