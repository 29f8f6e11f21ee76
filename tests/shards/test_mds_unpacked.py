"""Compressed shards: unpacked once for all processes of a machine, and kept within the bound of the cache."""

from __future__ import annotations

import json
import multiprocessing
import pickle
import resource
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from busy_support import HANG
from mds_writer import write_mds
from typer.testing import CliRunner

from penstock.errors import ShardError, StorageError
from penstock.shards.mds import MDSFolder, local_files
from penstock.storage import Cache, Storage
from penstock.tools.cli.app import app

SIMPLE = {"image": "bytes", "label": "int", "name": "str"}


def simple(n: int) -> list[dict[str, Any]]:
    return [{"image": bytes([k % 256]) * (k % 7), "label": k - 3, "name": f"n {k}"} for k in range(n)]


def kept(cache: Path) -> list[Path]:
    """Unpacked shards."""
    return [path for path in cache.rglob("*") if path.is_file() and path.suffix == ".mds"]


def _sum(folder: Path, cache: Path, start: Any, answer: Any) -> None:
    start.wait(30)
    answer.put(sum(sample["label"] for sample in MDSFolder(folder, cache_dir=cache)))


def test_one_process_unpacks_while_others_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = simple(300)
    write_mds(tmp_path / "d", SIMPLE, samples, per_shard=100, compression=["bz2"])
    unpack = local_files.decompress

    def slow(*arguments: Any, name: str) -> bytes:
        with (tmp_path / "log").open("a") as log:
            log.write("x")
        time.sleep(0.1)  # the other has to wait for this
        return unpack(*arguments, name=name)

    monkeypatch.setattr(local_files, "decompress", slow)
    context = multiprocessing.get_context("fork")
    start, answer = context.Barrier(3), context.SimpleQueue()
    arguments = (tmp_path / "d", tmp_path / "cache", start, answer)
    running = [context.Process(target=_sum, args=arguments) for _ in range(3)]
    for process in running:
        process.start()
    for process in running:
        process.join(HANG)
        assert process.exitcode == 0
    assert [answer.get() for _ in running] == [sum(sample["label"] for sample in samples)] * 3
    assert (tmp_path / "log").read_text() == "xxx"  # each shard once
    assert len(kept(tmp_path / "cache")) == 3


class TestBound:
    """What is unpacked is kept within the bound of the cache, and known to its commands."""

    def test_unpacked_shards_make_room_and_stay_open(self, tmp_path: Path) -> None:
        samples = simple(400)
        write_mds(tmp_path / "d", SIMPLE, samples, per_shard=100, compression=["zstd"])
        cache = Cache(tmp_path / "cache", max_bytes=9000)
        folder = MDSFolder(tmp_path / "d", cache_dir=cache)
        for number in (0, 399, 1, 150, 250):
            assert folder[number] == samples[number]
            assert sum(path.stat().st_size for path in kept(tmp_path / "cache")) <= 9000
        assert len(kept(tmp_path / "cache")) < 4
        assert list(folder) == samples  # out of the maps that are open, whatever the cache removed
        assert list(pickle.loads(pickle.dumps(folder))) == samples
        assert sum(path.stat().st_size for path in kept(tmp_path / "cache")) <= 9000
        with pytest.raises(StorageError, match="more than the cache"):
            MDSFolder(tmp_path / "d", cache_dir=Cache(tmp_path / "small", max_bytes=100))[0]

    def test_the_users_cache_holds_them(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
        samples = simple(20)
        write_mds(tmp_path / "d", SIMPLE, samples, compression=["gz"])
        assert list(MDSFolder(tmp_path / "d")) == samples
        run = partial(CliRunner().invoke, app)
        entries = json.loads(run(["cache", "info", "--json"]).stdout)["entries"]
        assert sorted(entry["url"].rpartition("/")[2] for entry in entries) == ["shard.00000.mds", "shard.00001.mds"]
        assert run(["cache", "verify"]).exit_code == 0
        (path,) = (path for path in kept(tmp_path / "home") if path.name == "shard.00000.mds")
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        assert run(["cache", "verify", "--remove"]).exit_code == 1
        assert list(MDSFolder(tmp_path / "d")) == samples
        assert json.loads(run(["cache", "clear", "--json"]).stdout)["removed"] == 2
        assert kept(tmp_path / "home") == []

    def test_what_is_removed_before_it_is_mapped(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = write_mds(tmp_path / "d", SIMPLE, simple(9), compression=["gz"])
        open_ = Cache.open

        def hasty(*arguments: Any, **options: Any) -> Any:
            copy = open_(*arguments, **options)
            shutil.rmtree(Path(copy.path).parent)  # as another process may at any time
            return copy

        monkeypatch.setattr(Cache, "open", hasty)
        assert list(MDSFolder(folder, cache_dir=tmp_path / "cache")) == simple(9)

    def test_of_a_store_what_is_unpacked_is_not_fetched_again(self, server: Any, tmp_path: Path) -> None:
        samples = simple(400)
        folder = write_mds(tmp_path / "d", SIMPLE, samples, per_shard=100, compression=["zstd"])
        for path in folder.iterdir():
            url = server.put(f"d/{path.name}", path.read_bytes())
        cache = Cache(tmp_path / "cache", max_bytes=24_000)
        remote = partial(MDSFolder, url.rpartition("/")[0], storage=Storage(cache=cache, attempts=2))
        assert remote()[0] == samples[0]
        for entry in cache.entries():
            if entry.url.endswith(".zstd"):
                shutil.rmtree(entry.folder)
        server.requests.clear()
        assert remote()[99] == samples[99]
        assert server.data_requests() == [("/d/index.json", None)]
        assert list(remote()) == samples  # all of it in less than a minute, and within the bound
        assert sum(entry.size for entry in cache.entries()) <= 24_000
        (tmp_path / "full").mkdir()
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        try:
            with pytest.raises(StorageError, match=r"shard\.00000\.mds in the cache .*ulimit -f"):
                MDSFolder(folder, cache_dir=tmp_path / "full")[0]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert kept(tmp_path / "full") == []

    def test_damage_after_unpacking_is_found_by_the_hash(self, tmp_path: Path) -> None:
        write_mds(tmp_path / "d", SIMPLE, simple(9), compression=["gz"], hashes=["sha1"])
        assert list(MDSFolder(tmp_path / "d", cache_dir=tmp_path / "cache")) == simple(9)
        (path,) = kept(tmp_path / "cache")
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        with pytest.raises(ShardError, match=r"shard\.00000\.mds has sha1 .*, but .* in the index"):
            MDSFolder(tmp_path / "d", cache_dir=tmp_path / "cache", validate_hash="sha1")[0]

    def test_a_broken_file_leaves_nothing_behind(self, tmp_path: Path) -> None:
        folder = write_mds(tmp_path / "d", SIMPLE, simple(9), compression=["gz"])
        path = folder / "shard.00000.mds.gz"
        path.write_bytes(bytes(path.stat().st_size))
        with pytest.raises(ShardError, match="cannot be decompressed as gz"):
            MDSFolder(folder, cache_dir=tmp_path / "cache")[0]
        assert kept(tmp_path / "cache") == []
