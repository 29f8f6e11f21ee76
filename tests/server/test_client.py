"""`Client` and `RemoteManifest`: the same rows as from the file, in every process and thread."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from busy_support import HANG
from dataset_support import Counting, write_kinds
from full_run import full_only
from interpreter_support import SERVES, run
from server_support import Process, Share, expected, lines, pages_of, random_rows, served, whole, write_lines

from penstock.errors import (
    ConfigError,
    ManifestError,
    ServerAuthError,
    ServerChangedError,
    ServerForkError,
    ServerUnavailableError,
    TicketError,
    UnknownDataSetError,
)
from penstock.manifest import Manifest
from penstock.server import Client, Limits, Server
from penstock.server.connections import _is_grpc_running
from penstock.server.connections import process as this_process
from penstock.server.remote_manifest import RemoteManifest

KINDS = ["text", "odd", "unlabelled", "csv", "jsonl", "parquet", "several", "view"]


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return Manifest.open(write_lines(tmp_path_factory.mktemp("data") / "train.txt", 100_000))


@pytest.fixture(scope="module")
def elsewhere(manifest: Manifest) -> Iterator[Process]:
    with served(manifest.sources[0]) as [process]:
        yield process


@pytest.fixture
def client(elsewhere: Process) -> Iterator[Client]:
    with Client(elsewhere.address) as client:
        yield client


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Client, dict[str, Manifest]]]:
    manifests = write_kinds(tmp_path_factory.mktemp("kinds"))
    with Server(manifests) as server, Client(server.address) as client:
        yield client, manifests


class TestManifest:
    @pytest.mark.parametrize("name", KINDS)
    def test_is_the_same(self, kinds: tuple[Client, dict[str, Manifest]], name: str) -> None:
        client, manifests = kinds
        there, here = client.manifest(name), manifests[name]
        assert (len(there), there.fingerprint, there.root) == (len(here), here.fingerprint, here.root)
        assert there.schema == here.schema == client.info(name).schema
        assert there.nbytes == here.nbytes
        assert list(there) == list(here)
        rows = [3, 0, -1, 3, len(here) - 2]
        assert there.records(rows) == here.records(rows)
        assert there.records([]) == []
        assert [there[row] for row in rows] == [here[row] for row in rows]
        assert there.gather(rows) == here.gather(rows)
        assert there.gather([]).schema == here.gather([]).schema

    @pytest.mark.parametrize("name", [name for name in KINDS if name not in ("odd", "several")])  # not UTF-8
    def test_tables(self, kinds: tuple[Client, dict[str, Manifest]], name: str) -> None:
        client, manifests = kinds
        assert client.manifest(name).take([4, 1, 1]).equals(manifests[name].take([4, 1, 1]))
        assert client.manifest(name).column("path").equals(manifests[name].column("path"))

    @pytest.mark.parametrize("name", KINDS)
    def test_views_and_pickles(self, kinds: tuple[Client, dict[str, Manifest]], name: str) -> None:
        client, manifests = kinds
        there, here = client.manifest(name)[10:2:-3], manifests[name][10:2:-3]
        copy = pickle.loads(pickle.dumps(there))
        for one in (there, copy):
            assert isinstance(one, RemoteManifest)
            assert one.fingerprint == here.fingerprint
            assert list(one) == list(here)

    def test_pages_are_parsed_by_the_manifest(self, kinds: tuple[Client, dict[str, Manifest]]) -> None:
        client, manifests = kinds
        for name, manifest in manifests.items():
            part = Share(name=name, fingerprint=manifest.fingerprint, samples=len(manifest), seed=3, page_rows=7)
            rows, records = part.rows(), []
            for batch in pages_of(client, part):
                at = len(records)
                records += client.manifest(name).parse(batch, rows[at : at + batch.num_rows])
            assert records == manifest.records(rows)

    def test_a_row_that_does_not_parse(self, tmp_path: Path) -> None:
        (tmp_path / "bad.txt").write_text("a.jpg 1\nb.jpg one\n")
        with Server({"bad": tmp_path / "bad.txt"}) as server, Client(server.address) as client:
            with pytest.raises(ManifestError, match=r"bad of <Client .*>, row 1: label 'one' is .*: 'b\.jpg one'"):
                client.manifest().records([0, 1])
            assert client.manifest()[0].path == "a.jpg"

    def test_what_it_was_called_before_it_grew(self, tmp_path: Path) -> None:
        path = write_lines(tmp_path / "train.txt", 100)
        before = Manifest.open(path).fingerprint
        with path.open("a") as file:
            file.write("more.jpg 1\n")
        with Server({"train": path}) as server, Client(server.address) as client:
            there = client.manifest()
            assert there.prefix_fingerprint(100) == before
            assert there.is_prefix_of_current(before, 100)
            assert not there.is_prefix_of_current(before, 99)
            with pytest.raises(ManifestError, match="from 0 to 101"):
                there.prefix_fingerprint(102)

    def test_is_not_served_again(self, client: Client) -> None:
        with pytest.raises(ConfigError, match=r"'again' is <RemoteManifest of .*>: serve its files"):
            Server({"again": client.manifest()})

    def test_repr_and_sources(self, client: Client) -> None:
        assert repr(client.manifest()) == f"<RemoteManifest of 100,000 rows: path, label; train of {client!r}>"
        assert client.manifest().sources == ()

    def test_reopened_is_the_newest(self, tmp_path: Path) -> None:
        path = write_lines(tmp_path / "train.txt", 10)
        with Server({"train": path}) as server, Client(server.address) as client:
            there = client.manifest()
            os.replace(write_lines(tmp_path / "new.txt", 20), path)
            server.reload()
            assert (len(there), len(there.reopened())) == (10, 20)


class TestPages:
    def test_in_order(self, client: Client, manifest: Manifest) -> None:
        part = whole(client, seed=1, world_size=3, rank=2, mini_epochs=2, mini_epoch=1)
        assert lines(pages_of(client, part)) == expected(manifest, part)

    def test_many_at_once_in_a_thread(self, client: Client, manifest: Manifest) -> None:
        parts = [whole(client, seed=1, world_size=4, rank=rank, page_rows=1000) for rank in range(4)]
        streams = [pages_of(client, part) for part in parts]
        got: list[list[bytes]] = [[] for _ in parts]
        for _ in range(3):
            for stream, found in zip(streams, got, strict=True):
                found += lines([next(stream)])
        for part, stream, found in zip(parts, streams, got, strict=True):
            assert found + lines(stream) == expected(manifest, part)

    def test_jobs_do_not_know_of_each_other(self, client: Client, manifest: Manifest) -> None:
        jobs = [(world, seed, rank) for world, seed in ((2, 0), (3, 9)) for rank in range(world)]

        def read(job: tuple[int, int, int]) -> None:
            part = whole(client, world_size=job[0], seed=job[1], rank=job[2])
            assert lines(pages_of(client, part)) == expected(manifest, part)

        with ThreadPoolExecutor(5) as pool:
            list(pool.map(read, jobs))

    def test_refusals(self, client: Client) -> None:
        part = whole(client)
        with pytest.raises(UnknownDataSetError, match=r"grpc://127.*: there is no dataset 'x': this server has"):
            next(pages_of(client, replace(part, name="x")))
        with pytest.raises(ServerChangedError, match="f" * 32):
            next(pages_of(client, replace(part, fingerprint="f" * 32)))
        with pytest.raises(TicketError, match="row 100000 was requested of 100000 rows"):
            next(pages_of(client, replace(part, samples=100_001, shuffle="none", begin=99_000)))


class TestRows:
    def test_any_order(self, client: Client, manifest: Manifest) -> None:
        for rows in ([5], [3, 1, 3], random_rows(100_000, 256), range(10), np.array([7], np.uint16)):
            batch = client.rows("train", manifest.fingerprint, rows)  # type: ignore[arg-type]
            assert batch.column(0).to_pylist() == manifest.raw(rows).to_pylist()

    def test_none(self, client: Client, manifest: Manifest) -> None:
        assert client.rows("train", manifest.fingerprint, []).num_rows == 0

    def test_more_than_one_request_takes(self, client: Client, manifest: Manifest) -> None:
        rows = random_rows(100_000, 150_000)
        assert client.rows("train", manifest.fingerprint, rows).column(0) == manifest.raw(rows)

    def test_outside(self, client: Client, manifest: Manifest) -> None:
        for row in (100_000, -1):
            with pytest.raises(TicketError, match=f"row {row} was requested of 100000 rows"):
                client.rows("train", manifest.fingerprint, [0, row])
        with pytest.raises(TypeError, match="integers"):
            client.rows("train", manifest.fingerprint, [0.5])  # type: ignore[list-item]
        assert client.rows("train", manifest.fingerprint, [0]).num_rows == 1

    def test_numbers_that_are_no_int64(self, client: Client, manifest: Manifest) -> None:
        """They are not taken for negative ones, which a manifest would count from its end."""
        for number in (2**63, 2**64 - 1):
            with pytest.raises(TicketError, match=f"row {2**63 - 1} was requested"):
                client.rows("train", manifest.fingerprint, [number])
            with pytest.raises(IndexError, match=f"row {number} is out of range"):
                client.manifest("train").records([number])
        rows = np.array([5, 3], np.uint64)
        assert client.rows("train", manifest.fingerprint, rows).column(0) == manifest.raw(rows)

    def test_threads(self, client: Client, manifest: Manifest) -> None:
        def read(seed: int) -> bool:
            rows = random_rows(100_000, 50, seed)
            found = client.rows("train", manifest.fingerprint, rows)
            return bool(found.column(0) == manifest.raw(rows))

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(read, range(400)))

    def test_two_data_sets_in_a_thread(self, kinds: tuple[Client, dict[str, Manifest]]) -> None:
        client, manifests = kinds
        for _ in range(3):
            for name in ("text", "csv"):
                assert client.rows(name, manifests[name].fingerprint, [2]).num_rows == 1

    def test_closed_while_other_threads_begin(self, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
        """Which is when the set of their readers grows."""
        done = threading.Event()

        def begin() -> None:
            number = 0
            while not done.is_set():
                number = (number + 1) % 1000
                with suppress(TypeError):  # refused when the reader exists, and before it connects
                    client.rows(str(number), "0" * 32, ["no number"])  # type: ignore[list-item]

        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-6)
        threads = [threading.Thread(target=begin) for _ in range(3)]
        try:
            for thread in threads:
                thread.start()
            until = time.monotonic() + 1
            while time.monotonic() < until:
                client.close()
        finally:
            done.set()
            sys.setswitchinterval(interval)
            for thread in threads:
                thread.join()

    def test_closed_while_other_threads_read(self, client: Client, manifest: Manifest) -> None:
        """They continue on another connection."""
        done = threading.Event()

        def read() -> None:
            while not done.is_set():
                assert client.rows("train", manifest.fingerprint, [5, 3]).num_rows == 2

        with ThreadPoolExecutor(2) as pool:
            reads = [pool.submit(read) for _ in range(2)]
            for _ in range(50):
                client.close()
                time.sleep(0.005)
            done.set()
            for one in reads:
                one.result(HANG)

    def test_connections_of_threads_that_ended_are_closed(self, client: Client, manifest: Manifest) -> None:
        def read() -> None:
            client.rows("train", manifest.fingerprint, [1])

        gc.collect()
        before = len(this_process.calls)
        for _ in range(5):
            thread = threading.Thread(target=read)
            thread.start()
            thread.join()
        gc.collect()
        assert len(this_process.calls) <= before


class TestBatches:
    """Several requests for rows under way at a time."""

    SIZES = (5, 1, 256, 0, 4096, 3, 70_000, 2000, 2500, 8, 65_536)

    @pytest.mark.parametrize("ahead", [1, 2, 4, 100])
    def test_in_the_order_of_the_requests(self, client: Client, manifest: Manifest, ahead: int) -> None:
        requests = [random_rows(100_000, size, seed) for seed, size in enumerate(self.SIZES)]
        found = list(client.batches("train", manifest.fingerprint, iter(requests), ahead=ahead))
        assert [batch.column(0) for batch in found] == [manifest.raw(rows) for rows in requests]

    def test_requests_are_taken_no_earlier_than_said(self, client: Client, manifest: Manifest) -> None:
        taken = []

        def requests() -> Iterator[list[int]]:
            for row in range(20):
                taken.append(row)
                yield [row]

        stream = client.batches("train", manifest.fingerprint, requests(), ahead=3)
        assert not taken
        for number, _ in enumerate(stream):
            assert len(taken) <= number + 4
        assert len(taken) == 20

    def test_long_requests_take_turns_on_two_calls(self, manifest: Manifest) -> None:
        """So that one is answered while the answer to the other is read."""
        seen, begun = Counting(), threading.Semaphore(0)
        gather = Manifest.gather

        def told(self: Manifest, rows: Any, *more: Any) -> pa.RecordBatch:
            if len(rows):
                begun.release()
            return gather(self, rows, *more)

        with Server({"train": manifest}, observer=seen) as server, Client(server.address) as client:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Manifest, "gather", told)
                requests = [random_rows(100_000, 30_000, seed) for seed in range(6)]
                stream = client.batches("train", manifest.fingerprint, requests)
                found = [next(stream), next(stream)]
                for _ in range(6):  # two messages each: of the first two requests, and one of each of the next two
                    assert begun.acquire(timeout=HANG)
                found += stream
            assert [batch.column(0) for batch in found] == [manifest.raw(rows) for rows in requests]
        assert seen.streams == 2

    def test_long_answers_and_nobody_who_reads(self, tmp_path: Path) -> None:
        """A server that waits for its answers to be read must not wait for a client that waits for it."""
        path = tmp_path / "long.txt"
        path.write_text("".join(f"{k:08d}/{'x' * 200} {k}\n" for k in range(1000)))
        requests = [random_rows(1000, 4000, seed) for seed in range(400)]
        manifest = Manifest.open(path)
        with served(path) as [process], Client(process.address, timeout=300) as client:
            for rows, batch in zip(
                requests, client.batches("train", manifest.fingerprint, requests, ahead=400), strict=True
            ):
                assert batch.column(0) == manifest.raw(rows)

    def test_an_array_that_is_used_again_for_each_request(self, client: Client, manifest: Manifest) -> None:
        rows = np.empty(3, np.int64)

        def requests() -> Iterator[np.ndarray]:
            for row in range(0, 60, 3):
                rows[:] = range(row, row + 3)
                yield rows

        found = client.batches("train", manifest.fingerprint, requests())
        assert [batch.column(0) for batch in found] == [manifest.raw(range(k, k + 3)) for k in range(0, 60, 3)]

    def test_answers_in_pieces(self, manifest: Manifest) -> None:
        requests = [random_rows(100_000, 300, seed) for seed in range(10)]
        with Server({"train": manifest}, limits=Limits(message_bytes=1000)) as server, Client(server.address) as client:
            found = client.batches("train", manifest.fingerprint, requests)
            assert [batch.column(0) for batch in found] == [manifest.raw(rows) for rows in requests]

    def test_a_row_outside_comes_after_the_answers_before_it(self, client: Client, manifest: Manifest) -> None:
        for _ in range(100):  # a refusal may overtake them
            stream = client.batches("train", manifest.fingerprint, [[1], [2], [100_000], [3]])
            assert [next(stream).num_rows, next(stream).num_rows] == [1, 1]
            with pytest.raises(TicketError, match="row 100000 was requested"):
                next(stream)

    def test_what_the_requests_raise(self, client: Client, manifest: Manifest) -> None:
        def requests() -> Iterator[list[int]]:
            yield [1]
            raise OSError("of the user")

        with pytest.raises(OSError, match="of the user"):
            list(client.batches("train", manifest.fingerprint, requests()))
        with pytest.raises(TypeError, match="integers"):
            list(client.batches("train", manifest.fingerprint, [[0.5]]))  # type: ignore[list-item]
        with pytest.raises(ConfigError, match="ahead must be at least 1"):
            client.batches("train", manifest.fingerprint, [[1]], ahead=0)

    @full_only("waits for real time-outs")
    def test_a_consumer_that_is_slower_than_a_call_may_last(self, elsewhere: Process, manifest: Manifest) -> None:
        requests = [random_rows(100_000, 10, seed) for seed in range(12)]
        with Client(elsewhere.address, timeout=0.4) as client:
            stream = client.batches("train", manifest.fingerprint, requests)
            for number, (rows, batch) in enumerate(zip(requests, stream, strict=True)):
                assert batch.column(0) == manifest.raw(rows)
                time.sleep(0.7 if number in (1, 6) else 0.1)

    def test_left_early(self, client: Client, manifest: Manifest) -> None:
        gc.collect()
        before = len(this_process.calls)
        stream = client.batches("train", manifest.fingerprint, ([k] for k in range(1000)))
        next(stream)
        del stream
        gc.collect()
        assert len(this_process.calls) <= before


class TestProcesses:
    def test_pickle(self, client: Client) -> None:
        copy = pickle.loads(pickle.dumps(client))
        assert copy.info() == client.info()
        assert (copy.timeout, copy.patience, copy.addresses) == (client.timeout, client.patience, client.addresses)

    @full_only("a program for each", but=["workers", "of_a_fork"])
    @pytest.mark.parametrize("name", ["in_the_middle", "of_a_fork", "workers", "beside_a_server"])
    def test_forks(self, elsewhere: Process, manifest: Manifest, name: str) -> None:
        program = Path(__file__).with_name("fork_programs.py")
        done = run([str(program), name, elsewhere.address, str(manifest.sources[0])], timeout=HANG)
        assert (done.returncode, done.stderr) == (0, "")

    @pytest.mark.skipif(not Path("/proc/self/schedstat").is_file(), reason="the system does not tell")
    def test_threads_that_may_be_grpcs(self, tmp_path: Path) -> None:
        """As /proc shows them: another one's, gRPC's, one that has not run yet, one that ended during the look."""
        for text, more, found in (
            ("python", "81 2 3", False),
            ("grpc_global_tim", "81 2 3", True),
            ("python", "0 0 0", None),
            (None, "81 2 3", None),
        ):
            tasks = tmp_path / f"{text}-{more[0]}"
            (tasks / "7").mkdir(parents=True)
            (tasks / "7" / "schedstat").write_text(more + "\n")
            if text is not None:
                (tasks / "7" / "comm").write_text(text + "\n")
            assert _is_grpc_running(tasks) is found
        assert _is_grpc_running(tmp_path / "none") is False

    def test_ends_without_a_word(self, elsewhere: Process, manifest: Manifest) -> None:
        """A program that ends in the middle of everything ends cleanly."""
        program = (
            "import sys; from penstock.server import Client\n"
            f"client = Client({elsewhere.address!r}); name = client.info()\n"
            "client.rows('train', name.fingerprint, [1])\n"
            "stream = client.batches('train', name.fingerprint, [range(1000)] * 50); next(stream)\n"
        )
        done = run(["-c", program], timeout=HANG, imports=SERVES)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

    def test_import_is_light(self) -> None:
        program = (
            "import sys, penstock, penstock.server; print('pyarrow.flight' in sys.modules, 'torch' in sys.modules)"
        )
        assert subprocess.check_output([sys.executable, "-c", program], text=True, timeout=HANG) == "False False\n"
        program = (
            "import sys; from penstock.server import Server, Client; Client; Server; print('torch' in sys.modules)"
        )
        assert subprocess.check_output([sys.executable, "-c", program], text=True, timeout=HANG) == "False\n"


class TestArguments:
    @pytest.mark.parametrize(
        "address", ["", "a", "http://a:1", "grpc://a", "grpc://:1", "grpc://a:0", "grpc://a:1/x", "grpc://a:99999", 5]
    )
    def test_addresses(self, address: Any) -> None:
        with pytest.raises(ConfigError, match="grpc://host:port"):
            Client([address])

    @pytest.mark.parametrize(
        "options, message",
        [
            ({"timeout": 0}, "a positive timeout"),
            ({"timeout": float("nan")}, "a positive timeout"),
            ({"patience": -1}, "patience must not be negative"),
            ({"token": ""}, "visible ASCII"),
            ({"token": "a b"}, "visible ASCII"),
            ({"token": "a", "token_file": "b"}, "only one of"),
            ({"token_file": "/none"}, "cannot read /none"),
            ({"tls_roots": "/none"}, "grpc\\+tls"),
            ({"tls_cert": "/none"}, "tls_key= together"),
        ],
    )
    def test_options(self, options: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            Client("grpc://127.0.0.1:1", **options)

    def test_an_address_that_is_given_twice(self, manifest: Manifest) -> None:
        """It is one server: what it refuses, nobody else will answer."""
        with Server({"train": manifest}, token="right") as server:
            client = Client([server.address] * 2, token="wrong", timeout=3600)
            assert len(client.addresses) == 1
            with pytest.raises(ServerAuthError):  # and nobody waits for another answer
                client.info()

    def test_no_address(self) -> None:
        with pytest.raises(ConfigError, match="at least one"):
            Client([])

    def test_the_token_is_not_shown(self) -> None:
        assert "secret" not in repr(Client("grpc://127.0.0.1:1", token="secret"))

    def test_nobody_there(self) -> None:
        with pytest.raises(ServerUnavailableError, match=r"grpc://127.0.0.1:9 is not available: .*refused"):
            Client("grpc://127.0.0.1:9", timeout=60, patience=0).info()

    def test_a_name_that_is_needed(self, kinds: tuple[Client, dict[str, Manifest]]) -> None:
        with pytest.raises(UnknownDataSetError, match="say which dataset: this server has 'text', 'odd'"):
            kinds[0].info()

    def test_health_of_all(self, client: Client, elsewhere: Process) -> None:
        both = Client([elsewhere.address, "grpc://127.0.0.1:9"], timeout=60)
        health = both.health()
        assert health[elsewhere.address] == "ok"
        assert "refused" in health["grpc://127.0.0.1:9"]


def test_fork_errors_are_ours() -> None:
    assert issubclass(ServerForkError, RuntimeError)
