"""The cache: one download per object whoever asks, bounded, sound after kill -9 at any point."""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from busy_support import HANG
from full_run import full_only
from planned_uses import uses
from typer.testing import CliRunner

from penstock.errors import ConfigError, StorageChangedError, StorageError, StorageUnavailableError
from penstock.storage import Cache, Storage, local_path, open_source
from penstock.storage.download import ENTRY, PIECE
from penstock.storage.planned_use import UsePublisher
from penstock.tools.cli.app import app

DATA = os.urandom(3 * PIECE + 777)
SMALL = os.urandom(100_000)


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage(cache=Cache(tmp_path / "cache"), idle=1.0, deadline=10.0, attempts=3)


def files(cache: Path, part: str = "objects") -> list[Path]:
    return [path for path in (cache / part).rglob("*") if path.is_file()]


class TestCopies:
    def test_a_copy_is_made_once(self, server: Any, storage: Storage) -> None:
        url = server.put("a.bin", DATA)
        path = storage.local_path(url)
        assert Path(path).read_bytes() == DATA
        count = len(server.data_requests())
        assert storage.local_path(url) == path
        assert len(server.data_requests()) == count == 4  # one for each block

    def test_a_new_version_is_another_copy(self, server: Any, storage: Storage) -> None:
        old = storage.local_path(server.put("a.bin", DATA))
        new = storage.local_path(server.put("a.bin", SMALL))
        assert Path(new).read_bytes() == SMALL
        assert Path(old).read_bytes() == DATA

    def test_the_same_name_elsewhere_is_another_copy(self, server: Any, storage: Storage) -> None:
        first, second = server.put("x/a.bin", SMALL), server.put("y/a.bin", SMALL)
        assert storage.local_path(first) != storage.local_path(second)
        assert storage.local_path(first + "?version=2") != storage.local_path(first)

    def test_local_paths_stay(self, tmp_path: Path) -> None:
        path = tmp_path / "file"
        path.write_bytes(SMALL)
        assert local_path(path) == local_path(f"file://{path}") == str(path)
        source = open_source(path)
        assert source.read_at(5, 10) == SMALL[5:15]
        assert source.stream().read() == SMALL
        with path.open("ab") as file:
            file.write(b"more")
        with pytest.raises(StorageChangedError):
            source.read_at(0, 1)
        with pytest.raises(FileNotFoundError):
            local_path(tmp_path / "none")

    def test_an_object_that_changes_on_the_way(self, server: Any, storage: Storage) -> None:
        url = server.put("a.bin", DATA)

        def fault(path: str, begin: int, end: int, number: int) -> None:
            if number == 4:
                server.put("a.bin", bytes(len(DATA)))

        server.fault = fault
        with pytest.raises(StorageChangedError, match="changed while it was read"):
            storage.local_path(url)
        assert files(storage.the_cache().folder) == []
        assert Path(storage.local_path(url)).read_bytes() == bytes(len(DATA))

    def test_what_is_complete_is_kept_by_a_failed_download(self, server: Any, storage: Storage) -> None:
        url = server.put("a.bin", DATA)
        server.fault = lambda path, begin, end, number: "500" if begin == 2 * PIECE else None
        with pytest.raises(StorageUnavailableError, match=r"a\.bin.*HTTP 500"):
            Storage(cache=storage.cache, attempts=2, parallel=1).local_path(url)
        server.fault = lambda *_: None
        server.requests.clear()
        assert Path(storage.local_path(url)).read_bytes() == DATA
        assert len(server.data_requests()) == 2

    def test_damage_on_disk_is_not_believed(self, server: Any, storage: Storage) -> None:
        url = server.put("a.bin", DATA)
        path = Path(storage.local_path(url))
        os.truncate(path, 1000)
        assert Path(storage.local_path(url)).read_bytes() == DATA
        with path.open("r+b") as file:
            file.write(b"damage")
        careful = Storage(cache=Cache(storage.the_cache().folder, verify=True))
        assert Path(careful.local_path(url)).read_bytes() == DATA
        (path.parent / ENTRY).write_bytes(b"{")
        assert Path(storage.local_path(url)).read_bytes() == DATA

    def test_what_others_remove_is_fetched_again(self, server: Any, storage: Storage) -> None:
        url = server.put("a.bin", SMALL)
        path = Path(storage.local_path(url))
        path.unlink()
        assert Path(storage.local_path(url)).read_bytes() == SMALL
        path.unlink()
        path.mkdir()
        assert [reason for _, reason in storage.the_cache().verify()[1]] == ["its file is missing"]
        assert Path(storage.local_path(url)).read_bytes() == SMALL
        shutil.rmtree(storage.the_cache().folder)
        assert Path(storage.local_path(url)).read_bytes() == SMALL
        cache = storage.the_cache()
        shutil.rmtree(cache.folder)
        assert cache.open(open_source(url, storage=storage)).read_at(0, len(SMALL)) == SMALL

    def test_a_damaged_partial_download_begins_again(self, server: Any, storage: Storage) -> None:
        url = server.put("a.bin", DATA)
        server.fault = lambda path, begin, end, number: "404" if begin >= 2 * PIECE else None
        with pytest.raises(StorageError):
            Storage(cache=storage.cache, parallel=1).local_path(url)
        (partial,) = (path for path in files(storage.the_cache().folder, "partial") if path.name == "a.bin")
        with partial.open("r+b") as file:  # as a power cut may leave it
            file.write(bytes(1000))
        server.fault = lambda *_: None
        server.requests.clear()
        assert Path(storage.local_path(url)).read_bytes() == DATA
        assert len(server.data_requests()) == 4

    def test_a_full_disk_is_an_error(self, server: Any, storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*arguments: Any) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(StorageError, match="the disk is full; free some space") as caught:
            storage.local_path(server.put("a.bin", DATA))
        assert caught.value.errno == 28
        assert files(storage.the_cache().folder, "partial") == []  # what did not fit does not keep the disk full

    def test_arguments(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="max_bytes must be a positive number of bytes"):
            Cache(tmp_path, max_bytes=0)
        with pytest.raises(ConfigError, match="attempts must be a positive integer"):
            Storage(attempts=0)
        for options in ({"attempts": "3"}, {"parallel": 1.5}, {"deadline": "1"}):
            with pytest.raises(ConfigError, match=f"{next(iter(options))} must be a positive"):
                Storage(**options)
        with pytest.raises(ConfigError, match="max_bytes must be a positive number of bytes, not '1GB'"):
            Cache(tmp_path, max_bytes="1GB")  # type: ignore[arg-type]
        (tmp_path / "file").write_text("")
        with pytest.raises(StorageError, match="cannot use the cache folder"):
            Cache(tmp_path / "file")
        cache = pickle.loads(pickle.dumps(Cache(tmp_path / "c", max_bytes=5)))
        assert (cache.folder, cache.max_bytes) == (tmp_path / "c", 5)


class TestBound:
    def fill(self, server: Any, cache: Cache, count: int) -> list[str]:
        storage = Storage(cache=cache)
        urls = [server.put(f"{number}.bin", bytes([number]) * 100_000) for number in range(count)]
        for url in urls:
            open_source(url, storage=storage).local()  # type: ignore[union-attr]
        return urls

    def test_the_least_recently_used_goes(self, server: Any, tmp_path: Path) -> None:
        cache = Cache(tmp_path, max_bytes=350_000)
        urls = self.fill(server, cache, 3)
        storage = Storage(cache=cache)
        storage.open(urls[0]).local()  # type: ignore[union-attr]
        storage.open(server.put("new.bin", b"n" * 100_000)).local()  # type: ignore[union-attr]
        left = {entry.url.rpartition("/")[2] for entry in cache.entries()}
        assert left == {"0.bin", "2.bin", "new.bin"}
        self.fill(server, cache, 10)
        assert sum(path.stat().st_size for path in files(tmp_path)) <= 350_000
        assert files(tmp_path, "trash") == files(tmp_path, "partial") == []

    def test_what_a_power_cut_left_goes_some_day(self, server: Any, tmp_path: Path) -> None:
        cache = Cache(tmp_path, max_bytes=1 << 20)
        left = tmp_path / "partial" / ("0" * 32)
        left.mkdir()
        (left / "a.bin").write_bytes(bytes(10_000))
        (left / ".entry.json").write_bytes(b"")
        cache.make_room(1000)
        assert left.exists()
        old = time.time() - 90_000
        os.utime(left, (old, old))
        cache.make_room(1000)
        assert not left.exists()

    def test_readers_keep_what_is_removed(self, server: Any, tmp_path: Path) -> None:
        storage = Storage(cache=Cache(tmp_path, max_bytes=150_000))
        held = storage.open(server.put("a.bin", SMALL)).local()  # type: ignore[union-attr]
        view = memoryview(held.map)
        storage.open(server.put("b.bin", b"b" * 100_000)).local()  # type: ignore[union-attr]
        assert not os.path.exists(held.path)
        assert view == SMALL
        assert held.read_at(5, 10) == SMALL[5:15]

    def test_a_path_that_was_handed_out_stays_for_a_while(self, server: Any, tmp_path: Path) -> None:
        storage = Storage(cache=Cache(tmp_path, max_bytes=150_000))
        path = storage.local_path(server.put("a.bin", SMALL))
        other = storage.local_path(server.put("b.bin", b"b" * 100_000))
        assert Path(path).read_bytes() == SMALL
        long_ago = time.time() - 100
        os.utime(Path(path).parent, (long_ago, long_ago))
        os.utime(Path(other).parent, (long_ago, long_ago))
        storage.local_path(server.put("c.bin", b"c" * 100_000))
        assert not Path(path).exists()
        assert not Path(other).exists()

    def test_larger_than_the_bound(self, server: Any, tmp_path: Path) -> None:
        cache = Cache(tmp_path, max_bytes=50_000)
        with pytest.raises(StorageError, match=r"100,\d+ bytes are more than the cache .* may hold, which is 50,000"):
            local_path(server.put("a.bin", SMALL), cache=cache)
        assert files(tmp_path, "partial") == []


_PROGRAM = """
import sys
from penstock.storage import Storage
print(Storage(cache=sys.argv[1], idle=5, deadline=20).local_path(sys.argv[2]), flush=True)
"""


def start(cache: Path, url: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(cache), url], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    try:
        return process.communicate(timeout=HANG)
    finally:
        process.kill()


class TestProcesses:
    def test_one_downloads_for_all(self, server: Any, tmp_path: Path) -> None:
        url = server.put("a.bin", DATA)
        server.fault = lambda *_: "drip:0.01"
        started = [start(tmp_path, url) for _ in range(3)]
        results = {finish(process)[0].strip() for process in started}
        assert len(results) == 1
        assert Path(results.pop()).read_bytes() == DATA
        assert len(server.data_requests()) == 4

    def test_one_downloads_for_all_threads(self, server: Any, storage: Storage) -> None:
        url = server.put("a.bin", DATA)
        server.fault = lambda *_: "drip:0.002"
        paths: list[str] = []
        threads = [threading.Thread(target=lambda: paths.append(storage.local_path(url))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANG)
        assert len(paths) == 8
        assert len(server.data_requests()) == 4

    def test_those_that_wait_get_the_error(self, server: Any, tmp_path: Path) -> None:
        url = server.put("a.bin", DATA)
        storage = Storage(cache=tmp_path, idle=0.7, attempts=1)
        server.fault = lambda *_: "hang"
        errors: list[StorageError] = []

        def ask() -> None:
            try:
                storage.local_path(url)
            except StorageError as error:
                errors.append(error)

        threads = [threading.Thread(target=ask) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANG)
        assert len(errors) == 5
        assert sum("whose download this one waited for" in str(error) for error in errors) == 4

    @full_only("waits for real time-outs")
    def test_a_holder_that_is_stopped_is_an_error(self, server: Any, tmp_path: Path) -> None:
        url = server.put("a.bin", DATA)
        server.fault = lambda *_: "drip:0.2"
        holder = start(tmp_path, url)
        try:
            while not list((tmp_path / "partial").glob("*/a.bin")):
                assert holder.poll() is None
                time.sleep(0.01)
            time.sleep(0.1)
            holder.send_signal(signal.SIGSTOP)
            with pytest.raises(StorageUnavailableError, match="another process of this machine downloads"):
                Storage(cache=tmp_path, idle=0.5, deadline=0.5).local_path(url)
        finally:
            holder.kill()
            holder.communicate()
        server.fault = lambda *_: None
        assert Path(Storage(cache=tmp_path).local_path(url)).read_bytes() == DATA

    @full_only("random moments for seconds")
    @pytest.mark.slow
    def test_killed_at_any_point(self, server: Any, tmp_path: Path) -> None:
        """kill -9 again and again, at random moments: in the end the copy is right, and most of it came once."""
        blocks = 24
        data = b"".join(number.to_bytes(8, "little") + os.urandom(8) * (PIECE // 8 - 1) for number in range(blocks))
        url = server.put("a.bin", data)
        server.fault = lambda *_: "drip:0.003"
        context = multiprocessing.get_context("fork")  # a new interpreter takes longer to begin than to download
        rng = random.Random(0)
        killed = requests = 0
        for _ in range(12):
            server.requests.clear()
            process = context.Process(target=_download, args=(str(tmp_path), url))
            process.start()
            while not server.data_requests() and process.is_alive():
                time.sleep(0.01)
            time.sleep(rng.uniform(0.0, 0.3))
            process.kill()
            process.join(HANG)
            killed += process.exitcode == -signal.SIGKILL
            requests += len(server.data_requests())
            for found in (tmp_path / "objects").glob("*/a.bin"):
                assert found.read_bytes() == data  # complete, or not there
        assert killed >= 2
        assert requests <= blocks + 9 * killed  # what was under way is lost, and no more
        assert Path(Storage(cache=tmp_path).local_path(url)).read_bytes() == data
        assert Cache(tmp_path).verify() == (1, [])
        assert files(tmp_path, "partial") == []

    def test_a_fork_does_not_keep_the_lock_of_a_killed_parent(self, server: Any, tmp_path: Path) -> None:
        url = server.put("a.bin", DATA)
        server.fault = lambda *_: "hang"
        program = (
            "import os, sys, threading, time\n"
            "from penstock.storage import Storage\n"
            "how = Storage(cache=sys.argv[1], idle=60)\n"
            "threading.Thread(target=how.local_path, args=(sys.argv[2],), daemon=True).start()\n"
            "time.sleep(0.7)\n"
            "child = os.fork()\n"
            "if child == 0:\n"
            "    time.sleep(3600)\n"
            "    os._exit(0)\n"
            "print(child, flush=True)\n"
            "time.sleep(60)\n"
        )
        parent = subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path), url], stdout=subprocess.PIPE, text=True
        )
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            parent.kill()
            parent.wait()
            server.fault = lambda *_: None
            assert Path(Storage(cache=tmp_path).local_path(url)).read_bytes() == DATA
        finally:
            os.kill(child, signal.SIGKILL)
            parent.stdout.close()

    @full_only("many processes at random moments")
    def test_eviction_among_readers(self, server: Any, tmp_path: Path) -> None:
        """Several processes read more than the cache holds: each gets the right bytes."""
        urls = [server.put(f"{number}.bin", bytes([number]) * 100_000) for number in range(6)]
        context = multiprocessing.get_context("fork")
        processes = [context.Process(target=_read_all, args=(str(tmp_path), urls, seed)) for seed in range(3)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(HANG)
            assert process.exitcode == 0
        assert sum(path.stat().st_size for path in files(tmp_path)) <= 350_000

    @full_only("eight processes")
    def test_many_processes_fetch_each_object_once(self, server: Any, tmp_path: Path) -> None:
        urls = [server.put(f"{number}.bin", number.to_bytes(2, "little") * 2_000) for number in range(200)]
        sources = [open_source(url, storage=Storage(cache=tmp_path)) for url in urls]
        server.requests.clear()
        context = multiprocessing.get_context("fork")
        processes = [context.Process(target=_open_all, args=(sources, seed)) for seed in range(8)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(HANG)
            assert process.exitcode == 0
        assert len(server.requests) == 200  # a block each

    @full_only("random moments for seconds")
    def test_random_processes_are_killed(self, server: Any, tmp_path: Path) -> None:
        """kill -9 strikes one of four again and again: each object comes once, but for what was under way."""
        urls = [server.put(f"{number}.bin", number.to_bytes(2, "little") * 20_000) for number in range(120)]
        sources = [open_source(url, storage=Storage(cache=tmp_path)) for url in urls]
        server.requests.clear()
        server.fault = lambda *_: "drip:0.02"
        context, rng = multiprocessing.get_context("fork"), random.Random(0)

        def start() -> Any:
            process = context.Process(target=_open_all, args=(sources, rng.randrange(100)))
            process.start()
            return process

        running, killed = [start() for _ in range(4)], 0
        while killed < 20:
            time.sleep(rng.uniform(0.0, 0.1))
            victim = running.pop(rng.randrange(4))
            victim.kill()
            victim.join(HANG)
            killed += 1
            running.append(start())
        server.fault = lambda *_: None
        for process in running:
            process.join(HANG)
            assert process.exitcode == 0
        assert Cache(tmp_path).verify() == (120, [])
        assert 120 <= len(server.requests) <= 120 + killed
        assert files(tmp_path, "partial") == files(tmp_path, "trash") == []


def _open_all(sources: list[Any], seed: int) -> None:
    for number in random.Random(seed).sample(range(len(sources)), len(sources)):
        copy = sources[number].local()
        assert copy.read_at(0, 2) == number.to_bytes(2, "little")


def _download(folder: str, url: str) -> None:
    Storage(cache=folder, idle=5, deadline=20).local_path(url)


def _read_all(folder: str, urls: list[str], seed: int) -> None:
    storage = Storage(cache=Cache(folder, max_bytes=350_000))
    rng = random.Random(seed)
    for _ in range(30):
        number = rng.randrange(len(urls))
        copy = storage.open(urls[number]).local()  # type: ignore[union-attr]
        assert copy.read_at(0, copy.size) == bytes([number]) * 100_000


class TestCommands:
    def run(self, *arguments: object, code: int = 0) -> Any:
        result = CliRunner().invoke(app, ["cache", *map(str, arguments)])
        assert result.exit_code == code, (result.output, result.exception)
        return result.stdout

    def test_info_verify_clear(self, server: Any, storage: Storage) -> None:
        folder = storage.the_cache().folder
        path = Path(storage.local_path(server.put("a.bin", DATA) + "?signature=hush"))
        storage.local_path(server.put("b.bin", SMALL))
        about = json.loads(self.run("info", "--json", "--folder", folder))
        assert about["objects"] == 2
        assert len(DATA) + len(SMALL) <= about["bytes"] < len(DATA) + len(SMALL) + 10_000
        assert about["max_bytes"] > 0
        assert "hush" not in json.dumps(about)
        text = self.run("info", "--folder", folder)
        assert "/a.bin" in text
        assert "just now" in text
        assert "2 copies read, none damaged" in self.run("verify", "--folder", folder)
        with path.open("r+b") as file:
            file.seek(PIECE + 5)
            file.write(b"damage")
        (damaged,) = json.loads(self.run("verify", "--json", "--folder", folder, code=1))["damaged"]
        assert damaged["reason"] == "its bytes are not those that were downloaded"
        assert "1 damaged and removed" in self.run("verify", "--remove", "--folder", folder, code=1)
        assert json.loads(self.run("verify", "--json", "--folder", folder))["objects"] == 1
        assert "removed 0 copies" in self.run("clear", "--unused-days", 1, "--folder", folder)
        assert json.loads(self.run("clear", "--json", "--folder", folder))["removed"] == 1
        assert files(folder) == []

    def test_running_jobs(self, server: Any, storage: Storage) -> None:
        url, folder = server.put("a.bin", SMALL), storage.the_cache().folder
        storage.local_path(url)
        future = UsePublisher(folder)
        future.publish(uses([url, "x", "y"], 0, 9, copied=[True, True, False]))
        future.advance(7)
        (job,) = json.loads(self.run("info", "--json", "--folder", folder))["jobs"]
        assert (job["pid"], job["objects"], job["copies"], job["here"], job["position"]) == (os.getpid(), 3, 2, 1, 7)
        text = " ".join(self.run("info", "--folder", folder).split())
        assert f"process {os.getpid()} at 7 needs 2 copies (1 cached), and ranges of 1 others" in text
        future.close()
        assert json.loads(self.run("info", "--json", "--folder", folder))["jobs"] == []

    def test_the_default_folder_and_others(self, tmp_path: Path) -> None:
        assert json.loads(self.run("info", "--json"))["folder"].endswith("penstock/objects")
        result = CliRunner().invoke(app, ["cache", "clear", "--folder", str(tmp_path)])
        assert isinstance(result.exception, StorageError)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("name", ["info", "clear", "verify"])
    def test_help(self, name: str) -> None:
        assert f"Example:  penstock cache {name}" in self.run(name, "--help")
