"""Servers that die, hang, come back or have other data: not a row is lost or comes twice."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from busy_support import slowness
from dataset_support import Counting, eventually
from full_run import full_only
from server_support import Pipe, Share, expected, lines, pages_of, random_rows, served, whole, write_lines

from penstock.errors import ServerChangedError, ServerError, ServerUnavailableError
from penstock.manifest import Manifest
from penstock.server import Client, Server

ROWS = 400_000


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lines(tmp_path_factory.mktemp("data") / "train.txt", ROWS)


@pytest.fixture(scope="module")
def manifest(file: Path) -> Manifest:
    return Manifest.open(file)


def paced(batches: Iterator[pa.RecordBatch], events: dict[int, object]) -> tuple[list[pa.RecordBatch], float]:
    """The batches, with something done before some of them, and the longest time that the next one took."""
    got: list[pa.RecordBatch] = []
    longest = 0.0
    while True:
        if len(got) in events:
            events[len(got)]()  # type: ignore[operator]
        begin = time.monotonic()
        batch = next(batches, None)
        longest = max(longest, time.monotonic() - begin)
        if batch is None:
            return got, longest
        got.append(batch)


class TestKilled:
    @pytest.mark.clock
    def test_and_restarted(self, file: Path, manifest: Manifest) -> None:
        with served(file) as [server], Client(server.address) as client:
            part = whole(client, seed=1, page_rows=4096)

            def restart() -> None:
                server.kill()
                server.restart()

            got, longest = paced(pages_of(client, part), {5: restart, 60: restart})
            assert lines(got) == expected(manifest, part)
            assert longest < 10 * slowness()

    @full_only("waits for real time-outs")
    def test_and_restarted_later(self, file: Path, manifest: Manifest) -> None:
        with served(file) as [server], Client(server.address) as client:
            part = whole(client, seed=1, page_rows=4096)
            back: list[float] = []

            def later() -> None:
                time.sleep(1)
                server.restart()
                back.append(time.monotonic())

            thread = threading.Thread(target=later)

            def kill() -> None:
                server.kill()
                thread.start()

            stream = pages_of(client, part)
            got, _ = paced(stream, {5: kill})
            thread.join()
            assert lines(got) == expected(manifest, part)

    @pytest.mark.clock
    def test_one_of_two(self, file: Path, manifest: Manifest) -> None:
        for victim in range(2):
            with served(file, file) as servers, Client([one.address for one in servers]) as client:
                part = whole(client, seed=2, page_rows=4096)
                got, longest = paced(pages_of(client, part), {5: servers[victim].kill})
                assert lines(got) == expected(manifest, part)
                assert longest < 10 * slowness()

    @full_only("servers killed one after the other")
    def test_in_turn(self, file: Path, manifest: Manifest) -> None:
        with served(file, file) as servers, Client([one.address for one in servers]) as client:
            part = whole(client, seed=3, page_rows=2048)
            events = {}
            for number in range(6):
                events[20 * number + 3] = servers[number % 2].kill
                events[20 * number + 6] = servers[number % 2].restart
            got, _ = paced(pages_of(client, part), events)
            assert lines(got) == expected(manifest, part)

    @pytest.mark.clock
    def test_rows_by_number(self, file: Path, manifest: Manifest) -> None:
        with served(file, file) as servers, Client([one.address for one in servers]) as client:
            fingerprint = client.info().fingerprint
            for number in range(60):
                if number % 20 == 5:
                    servers[number // 20 % 2].kill()
                if number % 20 == 10:
                    servers[number // 20 % 2].restart()
                rows = random_rows(ROWS, 64, number)
                begin = time.monotonic()
                assert client.rows("train", fingerprint, rows).column(0) == manifest.raw(rows)
                took = time.monotonic() - begin
                assert took < 10 or took < 10 * slowness()

    @pytest.mark.clock
    def test_several_requests_under_way(self, file: Path, manifest: Manifest) -> None:
        requests = [random_rows(ROWS, 64, number) for number in range(60)]
        with served(file, file) as servers, Client([one.address for one in servers]) as client:
            events = {}
            for number in range(3):
                events[20 * number + 5] = servers[number % 2].kill
                events[20 * number + 10] = servers[number % 2].restart
            stream = client.batches("train", manifest.fingerprint, requests, ahead=4)
            got, longest = paced(stream, events)
            assert [batch.column(0) for batch in got] == [manifest.raw(rows) for rows in requests]
            assert longest < 10 * slowness()

    def test_for_good(self, file: Path) -> None:
        with served(file) as [server]:
            client = Client(server.address, patience=1, timeout=2)
            stream = pages_of(client, whole(client))
            next(stream)
            server.kill()
            begin = time.monotonic()
            with pytest.raises(ServerUnavailableError, match=server.address):
                list(stream)
            assert time.monotonic() - begin > 0.5

    @full_only("many clients")
    def test_many_clients(self, file: Path, manifest: Manifest) -> None:
        with served(file, file) as servers, Client([one.address for one in servers]) as client:
            parts = [whole(client, seed=7, world_size=8, rank=rank, page_rows=512) for rank in range(8)]
            started = threading.Barrier(9)

            def read(part: Share) -> list[bytes]:
                stream = pages_of(client, part)
                head = next(stream)
                started.wait(20)
                return lines([head, *stream])

            with ThreadPoolExecutor(8) as pool:
                futures = [pool.submit(read, part) for part in parts]
                started.wait(20)
                servers[0].kill()
                got = [future.result(60) for future in futures]
            assert got == [expected(manifest, part) for part in parts]


class TestHung:
    """Half-open connections: the other side is gone without a word."""

    @pytest.mark.clock("did not answer in time")
    def test_a_frozen_server(self, file: Path, manifest: Manifest) -> None:
        with served(file, file) as servers:
            second = slowness()
            client = Client([one.address for one in servers], timeout=1.5 * second)
            part = whole(client, seed=1, page_rows=4096)
            for victim in servers:
                stream = pages_of(client, part)
                got, longest = paced(stream, {5: victim.freeze})
                victim.thaw()
                assert lines(got) == expected(manifest, part)
                assert longest < 1.5 * second + 10

    @full_only("waits for real time-outs; a frozen server and streams are always tested")
    @pytest.mark.clock("did not answer in time")
    def test_a_frozen_server_and_rows_by_number(self, file: Path, manifest: Manifest) -> None:
        with served(file, file) as servers:
            second = slowness()
            client = Client([one.address for one in servers], timeout=1.5 * second)
            fingerprint = client.info().fingerprint
            for victim in servers:
                client.rows("train", fingerprint, [1])
                victim.freeze()
                begin = time.monotonic()
                assert client.rows("train", fingerprint, [5]).column(0) == manifest.raw([5])
                assert time.monotonic() - begin < 1.5 * second + 10
                victim.thaw()

    @full_only("waits for real time-outs")
    @pytest.mark.clock("did not answer in time")
    def test_a_single_one(self, file: Path) -> None:
        with served(file) as [server]:
            second = slowness()
            client = Client(server.address, timeout=second, patience=second)
            part = whole(client)
            server.freeze()
            for call in (client.info, lambda: next(pages_of(client, part)), client.health):
                begin = time.monotonic()
                if call == client.health:
                    assert "did not answer in time" in call()[server.address]  # type: ignore[operator]
                else:
                    with pytest.raises(ServerUnavailableError, match=r"did not answer in time|not available"):
                        call()  # type: ignore[operator]
                assert time.monotonic() - begin < 4 * second + 10
            server.thaw()

    @full_only("waits for real time-outs")
    @pytest.mark.clock("did not answer in time")
    def test_a_network_that_is_gone_and_comes_back(self, file: Path, manifest: Manifest) -> None:
        with served(file) as [server], closing(Pipe(server.port)) as pipe:
            second = slowness()
            client = Client(pipe.address, timeout=second)
            part = whole(client, seed=1, page_rows=4096)

            def cut() -> None:
                pipe.cut()
                threading.Timer(1.5, pipe.mend).start()

            got, longest = paced(pages_of(client, part), {5: cut})
            assert lines(got) == expected(manifest, part)
            assert longest < 5 * second + 10

    @full_only("waits for real time-outs")
    def test_the_server_notices_clients_that_are_gone(self, tmp_path: Path, file: Path) -> None:
        seen = Counting()
        server = Server({"train": file}, observer=seen)
        with server, closing(Pipe(int(server.address.rpartition(":")[2]))) as pipe:
            client = Client(pipe.address, timeout=1, patience=0)
            info = client.info()
            stream = pages_of(client, Share(name="train", fingerprint=info.fingerprint, samples=info.rows))
            next(stream)
            client.rows("train", info.fingerprint, [1])
            assert seen.open == 2
            pipe.cut()
            eventually(lambda: seen.open == 0, 30)  # by the deadline, though nothing was heard
            pipe.mend()
            stream.close()
            client.close()


class TestSlowConsumers:
    @full_only("waits for real time-outs")
    def test_the_time_of_a_call_is_not_the_consumers(self, file: Path, manifest: Manifest) -> None:
        with served(file) as [server]:
            client = Client(server.address, timeout=2, patience=0)
            part = whole(client, seed=1, page_rows=1 << 15)
            got, _ = paced(pages_of(client, part), dict.fromkeys((2, 5, 6), lambda: time.sleep(2.5)))
            assert lines(got) == expected(manifest, part)

    @full_only("waits for real time-outs")
    def test_rows_by_number_now_and_then(self, file: Path, manifest: Manifest) -> None:
        with served(file) as [server]:
            client = Client(server.address, timeout=2, patience=0)
            fingerprint = client.info().fingerprint
            for pause in (0, 0.5, 1.5, 2.5, 0):
                time.sleep(pause)
                assert client.rows("train", fingerprint, [1]).num_rows == 1


class TestOtherData:
    @full_only("waits for real time-outs; a server that restarts with other data is always tested")
    def test_a_server_with_other_data_is_not_used(self, file: Path, manifest: Manifest, tmp_path: Path) -> None:
        other = write_lines(tmp_path / "train.txt", ROWS, "other")
        with served(file, other) as servers:
            client = Client([one.address for one in servers])
            part = Share(name="train", fingerprint=manifest.fingerprint, samples=ROWS, end=50_000)
            for _ in range(8):
                assert lines(pages_of(client, part)) == expected(manifest, part)
                assert client.rows("train", manifest.fingerprint, [3]).column(0) == manifest.raw([3])
            servers[0].kill()
            client = Client([one.address for one in servers], patience=1, timeout=1)
            with pytest.raises(ServerUnavailableError, match=f"{servers[1].address}: 'train' has the fingerprint"):
                list(pages_of(client, part))

    def test_all_have_other_data(self, file: Path, tmp_path: Path) -> None:
        """There is no use in patience."""
        with served(file, file) as servers:
            client = Client([one.address for one in servers], patience=3600)
            part = replace(whole(client), fingerprint="0" * 32)
            with pytest.raises(ServerChangedError) as caught:
                next(pages_of(client, part))
            assert all(one.address in str(caught.value) for one in servers)

    def test_restarted_with_other_data(self, tmp_path: Path) -> None:
        path = write_lines(tmp_path / "train.txt", ROWS)
        with served(path) as [server]:
            client = Client(server.address, patience=5)
            stream = pages_of(client, whole(client, page_rows=1024))
            next(stream)
            server.kill()
            write_lines(path, ROWS + 1)
            server.restart()
            with pytest.raises(ServerChangedError, match="was requested"):
                list(stream)


def test_errors_of_several_servers_are_told_together() -> None:
    client = Client(["grpc://127.0.0.1:9", "grpc://127.0.0.1:11"], timeout=0.3)
    with pytest.raises(ServerError) as caught:
        client.info()
    assert "127.0.0.1:9 is not" in str(caught.value)
    assert "127.0.0.1:11 is not" in str(caught.value)
