"""Shards in a store with their index beside them: opened without their data, read by ranges or copied."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
from full_run import full_only
from shard_support import make_tar, write_shards
from typer.testing import CliRunner

import penstock as ps
from penstock.errors import ConfigError, ShardError, StorageChangedError, StorageNotFoundError
from penstock.shards import ShardSet, shardset
from penstock.storage import Cache, Storage
from penstock.tools.cli.app import app

COUNTS = [40, 3, 25]


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    found = write_shards(tmp_path, COUNTS)
    ShardSet(found)  # writes the indexes
    return found


def put(server: Any, path: str, **options: Any) -> str:
    """Upload a shard and its index; the shard's address."""
    name = Path(path).name
    server.put(f"{name}.pidx", Path(f"{path}.pidx").read_bytes())
    return str(server.put(name, Path(path).read_bytes(), **options))


def storage_in(tmp_path: Path) -> Storage:
    return Storage(cache=Cache(tmp_path / "cache"))


def data_of(sample: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sample.items() if name != "__url__"}


def asked(server: Any) -> list[tuple[str, str]]:
    """Ranges of shards that were asked for, other than the look at their size."""
    return [(path, part) for path, part in server.data_requests() if path.endswith(".tar")]


def test_samples_by_ranges(server: Any, paths: list[str], tmp_path: Path) -> None:
    local = ShardSet(paths)
    urls = [put(server, path) for path in paths]
    shards = ShardSet(urls, copy=False, storage=storage_in(tmp_path))
    assert len(shards) == len(local)
    assert shards.fingerprint == local.fingerprint
    assert shards.key(41) == local.key(41)
    assert asked(server) == []
    assert data_of(shards[41]) == data_of(local[41])
    assert len(asked(server)) == 1
    order = [67, 0, 1, 2, 3, 50, 49, 42, 2, 2, -1]
    server.requests.clear()
    assert list(map(data_of, shards.records(order))) == list(map(data_of, local.records(order)))
    assert len(asked(server)) == 4  # 0 to 3, 42, 49 and 50, 67
    assert shards.records([]) == []
    assert list(map(data_of, shards)) == list(map(data_of, local))
    assert all(sample["__url__"] == urls[0] for sample in shards.records(range(40)))
    size = sum(file.stat().st_size for file in (tmp_path / "cache").rglob("*") if file.suffix == ".tar")
    assert size == 0


def test_samples_of_shards_here_and_in_a_store(server: Any, paths: list[str], tmp_path: Path) -> None:
    urls = [put(server, paths[0]), paths[1], put(server, paths[2])]
    shards, local = ShardSet(urls, copy=False, storage=storage_in(tmp_path)), ShardSet(paths)
    for order in ([0, 41], [0, 1, 40, 42, 50], [41, 43, 0, 67]):
        assert list(map(data_of, shards.records(order))) == list(map(data_of, local.records(order)))


def test_neighbours_up_to_a_block(server: Any, paths: list[str], tmp_path: Path) -> None:
    url = put(server, paths[0])
    storage = Storage(cache=tmp_path / "cache", block=8192)
    shards = ShardSet([url], copy=False, storage=storage)
    assert list(map(data_of, shards.records(range(40)))) == list(map(data_of, ShardSet(paths[:1])))
    ends = [tuple(map(int, part.removeprefix("bytes=").split("-"))) for _, part in asked(server)]
    assert len(ends) > 3
    assert all(last - first < 8192 for first, last in ends)


def test_handles_look_nothing_up_again(server: Any, paths: list[str], tmp_path: Path) -> None:
    shards = ShardSet([put(server, path) for path in paths], copy=False, storage=storage_in(tmp_path))
    text = pickle.dumps(shards)
    server.requests.clear()
    again = pickle.loads(text)
    assert len(again) == sum(COUNTS)
    assert server.requests == []
    assert again[5]["__key__"] == shards[5]["__key__"]


def label(sample: dict[str, Any]) -> int:
    return int(sample["cls"])


@full_only("workers for each", but=["inline"])
@pytest.mark.parametrize("options", [{}, {"num_workers": 2, "executor": "process"}], ids=["inline", "process"])
def test_in_a_loader(server: Any, paths: list[str], tmp_path: Path, options: dict[str, Any]) -> None:
    urls = [put(server, path) for path in paths]
    dataset = ps.ShardDataset(urls, copy=False, load=label, seed=3, storage=storage_in(tmp_path))
    expected = ps.ShardDataset(paths, load=label, seed=3)
    got, want = (
        [n for batch in ps.DataLoader(one, batch_size=8, **how) for n in batch.tolist()]
        for one, how in ((dataset, options), (expected, {}))
    )
    assert got == want
    with pytest.raises(ConfigError, match="already open"):
        ps.ShardDataset(dataset.shards, copy=False)


def test_copies_are_made_when_they_are_needed(server: Any, paths: list[str], tmp_path: Path) -> None:
    shards = ShardSet([put(server, path) for path in paths], storage=storage_in(tmp_path))
    assert len(shards) == sum(COUNTS)
    assert asked(server) == []
    assert data_of(shards[41]) == data_of(ShardSet(paths)[41])
    assert {path for path, _ in asked(server)} == {f"/{Path(paths[1]).name}"}


def test_an_index_that_is_not_there(server: Any, paths: list[str], tmp_path: Path) -> None:
    url = server.put("s.tar", Path(paths[0]).read_bytes())
    with pytest.raises(StorageNotFoundError, match=r"s\.tar\.pidx.*copy=True"):
        ShardSet([url], copy=False, storage=storage_in(tmp_path))
    assert len(ShardSet([url], storage=storage_in(tmp_path))) == COUNTS[0]


@pytest.mark.parametrize("damage", ["header", "truncated", "short", "empty"])
@pytest.mark.parametrize("copy", [False, True])
def test_a_damaged_index(server: Any, paths: list[str], tmp_path: Path, copy: bool, damage: str) -> None:
    url, content = put(server, paths[0]), Path(f"{paths[0]}.pidx").read_bytes()
    changed = {"header": content[:9] + b"?" + content[10:], "truncated": content[:-1], "short": content[:50]}
    damaged = changed.get(damage, b"")
    server.put(f"{Path(paths[0]).name}.pidx", damaged)
    with pytest.raises(ShardError, match="not a sound index"):
        ShardSet([url], copy=copy, storage=storage_in(tmp_path))


def test_an_index_that_is_damaged_behind_its_header(server: Any, paths: list[str], tmp_path: Path) -> None:
    url, content = put(server, paths[0]), bytearray(Path(f"{paths[0]}.pidx").read_bytes())
    content[-1] ^= 1
    server.put(f"{Path(paths[0]).name}.pidx", bytes(content))
    ranged = ShardSet([url], copy=False, storage=storage_in(tmp_path / "ranged"))
    for _ in range(2):
        with pytest.raises(ShardError, match=r"\.tar\.pidx is not a sound index"):
            ranged[0]
    # Of a copy an index is made here.
    copied = ShardSet([url], storage=storage_in(tmp_path / "copied"))
    assert list(map(data_of, copied)) == list(map(data_of, ShardSet(paths[:1])))


def test_an_index_of_another_shard(server: Any, paths: list[str], tmp_path: Path) -> None:
    put(server, paths[0])
    url = server.put(Path(paths[0]).name, Path(paths[1]).read_bytes())
    with pytest.raises(ShardError, match="the index beside it is of a shard with"):
        ShardSet([url], copy=False, storage=storage_in(tmp_path))
    with pytest.raises(ShardError, match="the index beside it is of a shard with"):
        ShardSet([url], storage=storage_in(tmp_path))


def test_an_index_of_another_shard_of_the_same_size(server: Any, tmp_path: Path) -> None:
    members = [(f"{i:03d}.{e}", bytes(700)) for i in range(9) for e in ("jpg", "cls")]
    first, second = tmp_path / "a.tar", tmp_path / "b.tar"
    first.write_bytes(make_tar(members))
    second.write_bytes(make_tar(members[2:] + members[:2]))
    ShardSet([first])
    put(server, str(first))
    url = server.put("a.tar", second.read_bytes())
    shards = ShardSet([url], copy=False, storage=storage_in(tmp_path))
    for read in (lambda: shards[4], lambda: shards.records([1, 2]), lambda: list(shards)):
        with pytest.raises(ShardError, match="is not what the index beside the shard says"):
            read()
    with pytest.raises(ShardError, match="no longer the shard"):
        ShardSet([url], storage=storage_in(tmp_path))[4]


def test_the_command_writes_indexes_to_upload(
    server: Any, paths: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    put(server, paths[0])
    urls = [server.put(Path(paths[0]).name, Path(paths[1]).read_bytes()), put(server, paths[2])]  # one is stale
    run = CliRunner().invoke(app, ["shards", "index", *urls, paths[1], "--out", str(tmp_path / "out")])
    assert run.exit_code == 0, run.output
    for written in sorted((tmp_path / "out").iterdir()):
        server.put(written.name, written.read_bytes())
    shards = ShardSet(urls, copy=False)
    assert list(map(data_of, shards)) == list(map(data_of, ShardSet([paths[1], paths[2]])))
    again = CliRunner().invoke(app, ["shards", "index", urls[0], paths[0], "--out", str(tmp_path / "out")])
    assert isinstance(again.exception, ShardError)
    assert "two shards have an index named" in str(again.exception)


def test_a_shard_that_is_replaced(server: Any, paths: list[str], tmp_path: Path) -> None:
    url = put(server, paths[0])
    shards = ShardSet([url], copy=False, storage=storage_in(tmp_path))
    assert shards[0]["__key__"]
    server.put(Path(paths[0]).name, Path(paths[0]).read_bytes(), etag='"other"')
    with pytest.raises(StorageChangedError):
        shards[1]


def test_a_server_that_knows_no_ranges(server: Any, paths: list[str], tmp_path: Path) -> None:
    url = put(server, paths[0], ranges=False)
    shards = ShardSet([url], copy=False, storage=storage_in(tmp_path))
    assert list(map(data_of, shards.records([3, 4, 9]))) == list(map(data_of, ShardSet(paths).records([3, 4, 9])))


def test_addresses_that_ask_for_something(server: Any, paths: list[str], tmp_path: Path) -> None:
    url = put(server, paths[0])
    shards = ShardSet([url + "?token=secret"], copy=False, storage=storage_in(tmp_path))
    assert len(shards.records([0, 1])) == 2
    assert (f"/{Path(paths[0]).name}.pidx", "bytes=0-127") in server.requests


def test_copies_are_made_several_at_a_time(
    server: Any, paths: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = threading.Barrier(len(paths))

    class Slow(shardset.TarShard):
        def obtain(self, **options: Any) -> Any:
            together.wait(20)
            return super().obtain(**options)

    monkeypatch.setattr(shardset, "TarShard", Slow)
    urls = [server.put(Path(path).name, Path(path).read_bytes()) for path in paths]
    assert len(ShardSet(urls, storage=storage_in(tmp_path))) == sum(COUNTS)
