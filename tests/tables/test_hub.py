"""Data sets on a hub, ``hf://``: Parquet by ranges, JSON lines and Arrow by copies, pinned to a commit."""

from __future__ import annotations

import io
import json
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from http_support import Server
from hub_support import Hub

import penstock as ps
from penstock.errors import ConfigError, DataFileError, StateError, StorageAuthError, StorageError, StorageNotFoundError
from penstock.storage import Storage

pytest.importorskip("huggingface_hub")
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

NAME = "hf://datasets/o/n"
TOKEN = "hf_secret"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def hub() -> Iterator[Hub]:
    store = Server()
    servers = [store, Hub(store, TOKEN)]
    threads = [threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True) for server in servers]
    for thread in threads:
        thread.start()
    yield servers[1]
    for server, thread in zip(servers, threads, strict=True):
        server.shutdown()
        server.server_close()
        thread.join(10)


@pytest.fixture
def storage(hub: Hub, tmp_path: Path) -> Storage:
    return Storage(options={"endpoint": hub.endpoint, "token": TOKEN}, cache=tmp_path / "copies", attempts=2)


def text(k: int) -> str:
    return f"{k} " + np.random.default_rng(k).bytes(500).hex()


def parquet(begin: int, end: int, group: int = 100) -> bytes:
    out = io.BytesIO()
    numbers = range(begin, end)
    table = pa.table({"number": numbers, "text": [text(k) for k in numbers], "meta.tag": ["t"] * len(numbers)})
    pq.write_table(table, out, row_group_size=group, compression="zstd")
    return out.getvalue()


def test_a_few_rows_are_not_the_whole_file(hub: Hub, storage: Storage) -> None:
    data = parquet(0, 4000)
    commit = hub.commit({"data/train-00000-of-00001.parquet": data, "README.md": b"# n"})
    dataset = ps.open(f"{NAME}/data/train-*.parquet", storage=storage, shuffle="none")
    assert f"4,000 rows: number, text, meta.tag; {NAME}@{commit}/data/train-00000-of-00001.parquet" in repr(dataset)
    assert hub.sent < 100_000
    for k in (5, 17, 99, 3999, 3950):
        assert dataset[k] == {"number": k, "text": text(k), "meta.tag": "t"}
    assert len(data) > 2_000_000
    # Of 40 row groups, two.
    assert hub.sent < 100_000 + 2 * len(data) / 40 * 1.1
    before = hub.sent
    numbers = ps.TableFiles(f"{NAME}/data/train-*.parquet", columns=["number"], storage=storage)
    assert [int(row["number"]) for row in numbers.records([0, 1234, 3999])] == [0, 1234, 3999]
    assert hub.sent - before < 100_000 + 10_000
    assert not list((storage.the_cache().folder / "objects").iterdir())
    assert all(token is None for _, token in hub.store.authorizations), "the token went to another host"


def test_whole_epochs_in_workers(hub: Hub, storage: Storage) -> None:
    hub.commit({f"{k}.parquet": parquet(200 * k, 200 * k + 200, 50) for k in range(3)})
    dataset = ps.open(NAME, storage=storage, shuffle="block", seed=3)
    assert len(hub.calls) < 20
    for options in ({}, {"num_workers": 2, "executor": "process"}):
        loader = ps.DataLoader(dataset, 32, **options)
        assert sorted(k for batch in loader for k in batch["number"].tolist()) == list(range(600))
    assert pickle.loads(pickle.dumps(dataset)).fingerprint == dataset.fingerprint


def test_a_branch_that_moves(hub: Hub, storage: Storage) -> None:
    hub.commit({"a.parquet": parquet(0, 100)}, "v1")
    hub.commit({"a.parquet": parquet(0, 100), "README.md": b"x"}, "v2")
    hub.commit({"a.parquet": parquet(500, 600)})

    def opened(revision: str = "") -> Any:
        return ps.open(f"{NAME}{revision}/a.parquet", storage=storage, shuffle="none")

    old, new = opened("@v1"), opened()
    hub.commit({"a.parquet": parquet(700, 800)})
    # What is open stays at its commit, and what is opened sees the new one.
    assert [int(dataset[0]["number"]) for dataset in (old, new, opened())] == [0, 500, 700]
    assert opened("@v1").fingerprint == opened("@v2").fingerprint != opened().fingerprint
    with pytest.raises(StateError, match="fingerprint"):
        opened().load_state_dict(new.state_dict(5))


def test_json_lines_and_folders_of_datasets(hub: Hub, storage: Storage, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = [{"id": k, "text": text(k)} for k in range(300)]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    saved = datasets.DatasetDict({"test": datasets.Dataset.from_list(rows)})
    saved.save_to_disk(str(tmp_path / "saved"))
    arrow = {
        f"saved/{path.relative_to(tmp_path / 'saved')}": path.read_bytes()
        for path in (tmp_path / "saved").rglob("*")
        if path.is_file()
    }
    packed = zstandard.compress(lines)
    hub.commit({"a/part-0.jsonl.zst": packed, "a/part-1.jsonl": lines, "a/part-2.jsonl.zst": packed, **arrow})
    for name in ("a/part-?.jsonl*", "a/part-{0,2}.jsonl.zst", "a/part-1.jsonl", "a", "saved"):
        dataset = ps.open(f"{NAME}/{name}", storage=storage, shuffle="none", columns=["id", "text"])
        found = [row for batch in ps.DataLoader(dataset, batch_size=100, collate_fn=list) for row in batch]
        assert found == rows * (len(found) // 300)
        assert len(dataset) == len(found)
        assert dataset[len(dataset) - 1] == rows[299]
    with pytest.raises(ConfigError, match="no column 'txt'; there are id, text"):
        ps.JsonFiles(f"{NAME}/a/*.zst", storage=storage, columns=["txt"])


def test_errors(hub: Hub, storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    good = parquet(0, 100)
    hub.commit({"a.parquet": good, "cut.parquet": good[:-20], "bad.parquet": b"x" * 5000 + good[5000:]})
    with pytest.raises(StorageNotFoundError, match="none"):
        ps.open(f"{NAME}/none.parquet", storage=storage)
    with pytest.raises(StorageNotFoundError, match="no object matches"):
        ps.open(f"{NAME}/none-*.parquet", storage=storage)
    with pytest.raises(StorageNotFoundError, match="@never"):
        ps.open(f"{NAME}@never/a.parquet", storage=storage)
    with pytest.raises(DataFileError, match=r"cut\.parquet is not a Parquet file, or is truncated"):
        ps.open(f"{NAME}/cut.parquet", storage=storage)
    dataset = ps.open(f"{NAME}/bad.parquet", storage=storage, shuffle="none")
    with pytest.raises(DataFileError, match="row group 0, is damaged"):
        dataset[0]
    dataset = ps.open(f"{NAME}/a.parquet", storage=storage, shuffle="none")
    hub.store.faults("500", "cut:100", None)
    with pytest.raises(StorageError, match=r"HTTP 500|cut") as caught:
        Storage(storage.options, attempts=1).open(dataset.table.maps.files[0].path).read_at(0, 5000)
    assert not isinstance(caught.value, StorageNotFoundError)
    hub.store.faults("500")
    assert dataset[7]["number"] == 7
    stranger = Storage(options={"endpoint": hub.endpoint, "token": False})
    with pytest.raises((StorageAuthError, StorageNotFoundError)):
        ps.open(f"{NAME}/a.parquet", storage=stranger)
