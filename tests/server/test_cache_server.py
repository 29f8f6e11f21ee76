"""The copies of one node's cache for others: real servers, killed, frozen and damaged, beside a real store."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pytest
import xxhash
from busy_support import HANG
from full_run import full_only
from interpreter_support import SERVES, Popen, run
from store_server import Store

import penstock as ps
from penstock.errors import ConfigError, PenstockError
from penstock.server import CacheClient, Server
from penstock.server.connections import FAILURES
from penstock.server.copies import CACHE
from penstock.server.protocol import encode_key, encode_rows
from penstock.shards.writer import ShardWriter
from penstock.storage import Cache, RemoteSource, Storage
from penstock.storage.download import PIECE, hash_file
from penstock.storage.transfer import Cancel

SHARDS, SAMPLES = 12, 8
DATA = os.urandom(5 * PIECE + 1000)


class Node:
    """``penstock serve`` of the cache in a folder, in a process of its own."""

    def __init__(self, folder: Path, *arguments: str, port: int = 0) -> None:
        self.folder = folder
        command = ["-m", "penstock", "serve", "--cache-folder", str(folder), "--port", str(port), "--json", *arguments]
        self.process = Popen(command, imports=SERVES, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert self.process.stdout is not None
        said = json.loads(self.process.stdout.readline())
        assert said["cache"] == str(folder)
        self.address: str = said["address"]
        self.port = int(self.address.rpartition(":")[2])

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.communicate(timeout=HANG)


class Valve:
    """A TCP proxy to a server. Behind so many bytes of its answers it calls a function, once, and goes on."""

    def __init__(self, port: int, limit: int, then: Callable[[], object]) -> None:
        self._port, self._left, self._then = port, limit, then
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"grpc://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def was_reached(self) -> bool:
        return self._left <= 0

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._port))
            except OSError:
                client.close()
                continue
            threading.Thread(target=self._pump, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, True), daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, counts: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                if counts:
                    self._count(len(data))
                target.sendall(data)
        except OSError:
            pass
        for one in (source, target):
            # Closing alone would not wake the other thread.
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _count(self, size: int) -> None:
        with self._lock:
            before, self._left = self._left, self._left - size
            if self._left <= 0 < before:
                self._then()

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    (tmp_path / "store" / "data").mkdir(parents=True)
    with Store(tmp_path / "store") as made:
        yield made


@pytest.fixture
def serve() -> Iterator[Callable[..., Node]]:
    nodes: list[Node] = []

    def start(*arguments: Any, **options: Any) -> Node:
        nodes.append(Node(*arguments, **options))
        return nodes[-1]

    yield start
    for node in nodes:
        node.close()


@pytest.fixture
def first(store: Store, tmp_path: Path) -> Path:
    """The cache of a node that has an object, which is `DATA`."""
    (tmp_path / "store" / "data" / "object.bin").write_bytes(DATA)
    storage = Storage(cache=Cache(tmp_path / "first"))
    storage.local_path(url_of(store))
    store.reset()
    return tmp_path / "first"


def url_of(store: Store) -> str:
    return f"{store.url}/data/object.bin"


def bytes_of(store: Store) -> int:
    """What the store has sent of objects, without the looks at their versions."""
    counts = store.counts()
    return int(counts["bytes"]) - sum(1 for found in counts["objects"].values() if found["GET"])


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and "cache at" in r.getMessage()]


# ---------------------------------------------------------------------------------------------------- whole epochs


def put_shards(folder: Path, url: str) -> list[str]:
    with ShardWriter(str(folder / "s-%03d.tar"), maxcount=SAMPLES) as writer:
        for number in range(SHARDS * SAMPLES):
            writer.write({"__key__": f"{number:06d}", "bin": os.urandom(30_000), "txt": str(number)})
    ps.ShardSet(str(folder / "s-*.tar"))  # writes the indexes
    return [f"{url}/data/{path.name}" for path in sorted(folder.glob("s-*.tar"))]


def epoch(urls: list[str], storage: Storage, store: Store | None = None, **options: Any) -> list[list[str]]:
    dataset = ps.ShardDataset(urls, storage=storage, decode=True, shuffle="block", block_size=SAMPLES, window=2, seed=3)
    with ps.DataLoader(dataset, batch_size=5, **options) as loader:
        if store is not None:
            store.reset()
        return [batch["txt"] for batch in loader]


WAYS: dict[str, dict[str, Any]] = {
    "inline": {"executor": "inline"},
    "thread": {"executor": "thread", "num_workers": 2},
    "fork": {"num_workers": 2, "multiprocessing_context": "fork"},
    "forkserver": {"num_workers": 2, "multiprocessing_context": "forkserver"},
    "spawn": {"num_workers": 2, "multiprocessing_context": "spawn"},
}


@full_only("workers for each", but=["inline", "fork"])
@pytest.mark.parametrize("way", WAYS)
def test_what_one_node_has_costs_the_others_no_request(
    store: Store, serve: Callable[..., Node], tmp_path: Path, way: str
) -> None:
    urls = put_shards(tmp_path / "store" / "data", store.url)
    expected = epoch(urls, Storage(cache=Cache(tmp_path / "first")))
    node = serve(tmp_path / "first")
    with_peer = Storage(cache=Cache(tmp_path / "second"), peer=CacheClient(node.address, timeout=60))
    assert epoch(urls, with_peer, store, **WAYS[way]) == expected
    assert store.counts()["requests"] == {}
    assert Cache(tmp_path / "second").verify()[1] == []


@full_only("workers for each", but=["inline"])
@pytest.mark.parametrize("way", ["inline", "thread", "fork", "forkserver"])
def test_a_node_that_is_killed_in_the_middle_of_an_epoch(
    store: Store, serve: Callable[..., Node], tmp_path: Path, way: str
) -> None:
    urls = put_shards(tmp_path / "store" / "data", store.url)
    expected = epoch(urls, Storage(cache=Cache(tmp_path / "first")))
    node = serve(tmp_path / "first")
    valve = Valve(node.port, 5 * SAMPLES * 31_000, node.kill)
    storage = Storage(cache=Cache(tmp_path / "second"), peer=CacheClient(valve.address, timeout=60))
    assert epoch(urls, storage, store, **WAYS[way]) == expected
    valve.close()
    assert valve.was_reached
    asked = {key for key, found in store.counts()["objects"].items() if found["GET"]}
    assert 0 < len(asked) < SHARDS
    assert Cache(tmp_path / "second").verify()[1] == []


# ------------------------------------------------------------------------------------------------------ one object


@pytest.mark.parametrize("what", ["killed", "frozen"])
def test_a_transfer_goes_on_from_the_store(
    store: Store,
    first: Path,
    serve: Callable[..., Node],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    what: str,
) -> None:
    node = serve(first)
    stuck = threading.Event()

    def kill() -> None:
        node.kill()
        # What the system still holds of it would come, too.
        raise ConnectionError

    valve = Valve(node.port, 2 * PIECE + PIECE // 2, kill if what == "killed" else stuck.wait)
    timeout = 2 if what == "frozen" else 60
    storage = Storage(cache=tmp_path / "second", parallel=1, peer=CacheClient(valve.address, timeout=timeout))
    assert Path(storage.local_path(url_of(store))).read_bytes() == DATA
    stuck.set()
    valve.close()
    assert bytes_of(store) == len(DATA) - 2 * PIECE
    assert len(warnings(caplog)) == 1
    assert valve.address in warnings(caplog)[0]
    assert Cache(tmp_path / "second").verify()[1] == []


def test_a_connection_that_is_cut_is_made_again(
    store: Store, first: Path, serve: Callable[..., Node], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def cut() -> None:
        raise ConnectionError

    valve = Valve(serve(first).port, 2 * PIECE + PIECE // 2, cut)
    storage = Storage(cache=tmp_path / "second", parallel=1, peer=CacheClient(valve.address, timeout=60))
    assert Path(storage.local_path(url_of(store))).read_bytes() == DATA
    valve.close()
    assert valve.was_reached
    assert bytes_of(store) == 0
    assert warnings(caplog) == []


def test_a_damaged_copy_is_refused(
    store: Store, first: Path, serve: Callable[..., Node], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (copy,) = first.glob("objects/*/object.bin")
    with copy.open("r+b") as file:
        file.seek(PIECE + 5)
        file.write(bytes([DATA[PIECE + 5] ^ 1]))
    node = serve(first)
    storage = Storage(cache=tmp_path / "second", parallel=1, peer=CacheClient(node.address, timeout=60))
    assert Path(storage.local_path(url_of(store))).read_bytes() == DATA
    assert bytes_of(store) == len(DATA)
    (warning,) = warnings(caplog)
    assert "other bytes than it downloaded" in warning
    source = RemoteSource(url_of(store), Storage(cache=tmp_path / "third", peer=CacheClient(node.address, timeout=60)))
    assert source.read_at(PIECE, 10) == DATA[PIECE : PIECE + 10]
    assert len(warnings(caplog)) == 2


def test_a_short_copy_is_not_there(store: Store, first: Path, serve: Callable[..., Node], tmp_path: Path) -> None:
    (copy,) = first.glob("objects/*/object.bin")
    os.truncate(copy, 2 * PIECE)
    storage = Storage(cache=tmp_path / "second", peer=CacheClient(serve(first).address, timeout=60))
    assert Path(storage.local_path(url_of(store))).read_bytes() == DATA
    assert bytes_of(store) == len(DATA)
    assert not copy.exists()


def test_another_version_is_not_given(store: Store, first: Path, serve: Callable[..., Node], tmp_path: Path) -> None:
    new = bytes(reversed(DATA))
    (tmp_path / "new").write_bytes(new)
    os.replace(tmp_path / "new", tmp_path / "store" / "data" / "object.bin")
    storage = Storage(cache=tmp_path / "second", peer=CacheClient(serve(first).address, timeout=60))
    assert Path(storage.local_path(url_of(store))).read_bytes() == new
    assert bytes_of(store) == len(new)


def test_ranges_come_from_the_other_cache_too(
    store: Store, first: Path, serve: Callable[..., Node], tmp_path: Path
) -> None:
    client = CacheClient(serve(first).address, timeout=60)
    source = RemoteSource(url_of(store), Storage(cache=tmp_path / "second", peer=client))
    store.reset()
    for begin, size in ((0, 10), (PIECE - 5, 10), (3 * PIECE + 1, PIECE), (len(DATA) - 7, 100)):
        assert source.read_at(begin, size) == DATA[begin : begin + size]
    with source.stream() as file:
        assert file.read() == DATA
    assert store.counts()["requests"] == {}


def test_a_server_is_left_alone_and_then_asked_again(
    store: Store,
    first: Path,
    serve: Callable[..., Node],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = serve(first)
    client = CacheClient(node.address, timeout=60)
    key = Cache.key(RemoteSource(url_of(store)))
    target = memoryview(bytearray(1000))
    assert client.read(key, 0, target, Cancel()) == 1000
    node.kill()
    assert client.read(key, 0, target, Cancel()) == 0
    serve(first, port=node.port)
    assert client.read(key, 0, target, Cancel()) == 0
    assert len(warnings(caplog)) == 1
    monkeypatch.setattr("penstock.server.copies._REST", 0.0)
    again = CacheClient([node.address, "127.0.0.1:1"], timeout=60)
    assert again.read(key, 5, target, Cancel()) == 1000
    assert bytes(target) == DATA[5:1005]
    given_up = Cancel()
    given_up.set()
    assert again.read(key, 0, target, given_up) == 0
    client.close()
    again.close()


def test_a_restarted_server_costs_no_rest(
    store: Store, first: Path, serve: Callable[..., Node], caplog: pytest.LogCaptureFixture
) -> None:
    node = serve(first)
    client = CacheClient(node.address, timeout=60)
    key = Cache.key(RemoteSource(url_of(store)))
    target = memoryview(bytearray(1000))
    assert client.read(key, 0, target, Cancel()) == 1000
    node.kill()
    serve(first, port=node.port)
    assert client.read(key, 5, target, Cancel()) == 1000
    assert warnings(caplog) == []
    client.close()


# ---------------------------------------------------------------------------------------------------------- access


def test_who_has_no_token_reads_the_store(
    store: Store, first: Path, serve: Callable[..., Node], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "token").write_text("secret\n")
    node = serve(first, "--token-file", str(tmp_path / "token"))
    stranger = Storage(cache=tmp_path / "second", peer=CacheClient(node.address, token="guess", timeout=60))
    assert Path(stranger.local_path(url_of(store))).read_bytes() == DATA
    assert bytes_of(store) == len(DATA)
    (warning,) = warnings(caplog)
    assert "the token is wrong" in warning
    assert "guess" not in warning
    store.reset()
    friend = CacheClient(node.address, token_file=tmp_path / "token", timeout=60)
    friends = Storage(cache=tmp_path / "third", peer=friend)
    assert Path(friends.local_path(url_of(store))).read_bytes() == DATA
    assert bytes_of(store) == 0


def test_without_a_cache_there_are_no_copies(first: Path, write_manifest: Callable[..., Path]) -> None:
    with Server({"train": write_manifest(10)}) as server:
        client = CacheClient(server.address, timeout=60)
        assert client.read("0" * 32, 0, memoryview(bytearray(10)), Cancel()) == 0
        client.close()


def blocks_of(client: flight.FlightClient, key: str, numbers: list[int]) -> list[dict[str, Any]]:
    """The blocks of a copy, as any Flight client requests them."""
    writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(encode_key(CACHE, key)))
    writer.write_metadata(encode_rows(np.array(numbers)))
    writer.done_writing()
    found: list[dict[str, Any]] = reader.read_all().to_pylist()
    return found


def test_requests_that_make_no_sense(store: Store, first: Path) -> None:
    key = Cache.key(RemoteSource(url_of(store)))
    with Server({}, cache=Cache(first)) as server, flight.connect(server.address) as client:
        last = {"data": DATA[5 * PIECE :], "xxh3": xxhash.xxh3_64_hexdigest(DATA[5 * PIECE :])}
        assert blocks_of(client, key, [5]) == [last]
        assert [block["data"] for block in blocks_of(client, key, [5, 1])] == [last["data"], DATA[PIECE : 2 * PIECE]]
        assert len(blocks_of(client, key, [0, 1, 2, 3] * 5)) == 20
        assert blocks_of(client, "0" * 32, [7]) == []
        for name, reason in ((key, "row 6 was requested of 6"), ("../../etc/passwd", "32 hexadecimal digits")):
            with pytest.raises(FAILURES, match=reason):
                blocks_of(client, name, [6])


def test_a_copy_is_checked_once_for_requests_at_the_same_time(
    store: Store, first: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = Cache.key(RemoteSource(url_of(store)))
    checked: list[int] = []

    def slow(descriptor: int, size: int) -> Any:
        checked.append(size)
        time.sleep(0.5)
        return hash_file(descriptor, size)

    monkeypatch.setattr("penstock.server.copies.hash_file", slow)

    def ask(address: str) -> list[bytes]:
        with flight.connect(address) as client:
            return [block["data"] for block in blocks_of(client, key, [5])]

    with Server({}, cache=Cache(first)) as server, ThreadPoolExecutor(6) as pool:
        assert list(pool.map(ask, [server.address] * 6)) == [[DATA[5 * PIECE :]]] * 6
    assert checked == [len(DATA)]


def test_a_copy_that_takes_long_to_check_comes_from_the_store_meanwhile(
    store: Store, first: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its server is not left alone for that."""
    goes_on = threading.Event()

    def slow(descriptor: int, size: int) -> Any:
        goes_on.wait(HANG)
        return hash_file(descriptor, size)

    monkeypatch.setattr("penstock.server.copies.hash_file", slow)
    monkeypatch.setattr("penstock.server.copies._CHECK_WAIT", 0.1)
    with Server({}, cache=Cache(first)) as server:
        client = CacheClient(server.address, timeout=60)
        copy = Storage(cache=tmp_path / "second", peer=client).local_path(url_of(store))
        assert Path(copy).read_bytes() == DATA
        goes_on.set()
        target = memoryview(bytearray(1000))
        until = time.monotonic() + HANG
        while not client.read(Cache.key(RemoteSource(url_of(store))), 0, target, Cancel()):
            assert time.monotonic() < until
        assert bytes(target) == DATA[:1000]
        client.close()
    assert warnings(caplog) == []


@pytest.mark.parametrize(
    ("values", "digest"),
    [
        ([b"other"], xxhash.xxh3_64_hexdigest(b"bytes")),
        ([b"bytes"], ""),
        ([b"bytes"], None),
        ([b"by", b"tes"], xxhash.xxh3_64_hexdigest(b"bytes")),
        ([bytes(PIECE + 1)], xxhash.xxh3_64_hexdigest(bytes(PIECE + 1))),
        ([None], xxhash.xxh3_64_hexdigest(b"bytes")),
        ([7], xxhash.xxh3_64_hexdigest(b"bytes")),
    ],
    ids=["another hash", "empty hash", "no hash", "two values", "too long", "null", "a number"],
)
def test_answers_that_are_wrong(values: list[Any], digest: str | None, caplog: pytest.LogCaptureFixture) -> None:
    data = pa.array(values) if values == [7] else pa.array(values, pa.large_binary())
    batch = pa.record_batch([data, pa.array([digest] * len(values), pa.string())], names=["data", "xxh3"])

    class Wrong(flight.FlightServerBase):  # type: ignore[misc]
        def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
            writer.begin(batch.schema)
            reader.read_chunk()
            writer.write_batch(batch)

    target = bytearray(5)
    with Wrong("grpc://127.0.0.1:0") as server, closing(CacheClient(f"127.0.0.1:{server.port}", timeout=60)) as client:
        assert client.read("0" * 32, 0, memoryview(target), Cancel()) == 0
    assert target == bytes(5)
    assert len(warnings(caplog)) == 1


def test_arguments(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to serve"):
        Server({})
    with pytest.raises(ConfigError, match="CacheClient"):
        Storage(peer="grpc://127.0.0.1:1")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="positive timeout"):
        CacheClient("127.0.0.1:1", timeout=0)
    with pytest.raises(PenstockError, match="no address"):
        CacheClient("http://127.0.0.1:1")


# ----------------------------------------------------------------------------------------------------------- forks

FORKS = """
import os, sys, threading
from penstock.server import CacheClient
from penstock.storage.transfer import Cancel

address, key, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
client = CacheClient(address, timeout=60)
stop, wrong = threading.Event(), []

def read(size=size):
    target = memoryview(bytearray(size))
    return client.read(key, 0, target, Cancel()) == size

def others():
    try:
        while not stop.is_set():
            client.close()  # so that forks meet new connections, too
            assert read(4 << 20)
    except BaseException as error:
        wrong.append(error)

assert read()
threads = [threading.Thread(target=others, daemon=True) for _ in range(2)]
for thread in threads:
    thread.start()
for _ in range(6):
    pid = os.fork()
    if pid == 0:
        import signal
        signal.alarm(200)
        ok = False
        try:
            ok = read()
        finally:
            os._exit(0 if ok else 1)
    assert os.waitpid(pid, 0)[1] == 0
stop.set()
for thread in threads:
    thread.join()
assert not wrong, wrong
print("done")
"""


def test_forks_while_copies_are_read(store: Store, first: Path, serve: Callable[..., Node]) -> None:
    """As in a loader whose look-ahead is at work while it starts workers."""
    key = Cache.key(RemoteSource(url_of(store)))
    done = run(["-c", FORKS, serve(first).address, key, str(len(DATA))], imports=SERVES, timeout=HANG)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
