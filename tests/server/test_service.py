"""The server, as any Flight client sees it: what it serves, what it refuses, its limits, versions and end."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import pyarrow.parquet as parquet
import pytest
from busy_support import HANG
from dataset_support import Counting, eventually
from full_run import full_only
from interpreter_support import SERVES, run
from server_support import Share, expected, lines, pages_of, random_rows, write_lines

from penstock.errors import (
    ConfigError,
    ManifestError,
    ServerError,
    ServerLimitError,
    ServerUnavailableError,
    TicketError,
    UnknownDataSetError,
)
from penstock.manifest import Manifest
from penstock.server import Client, Limits, Server
from penstock.server.protocol import decode_error, encode_key

ROWS = 5000


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return Manifest.open(write_lines(tmp_path_factory.mktemp("data") / "train.txt", ROWS))


@pytest.fixture(scope="module")
def server(manifest: Manifest) -> Iterator[Server]:
    with Server({"train": manifest, "tail": manifest[-7:]}) as server:
        yield server


@pytest.fixture
def plain(server: Server) -> Iterator[flight.FlightClient]:
    with flight.connect(server.address) as client:
        yield client


def part_of(manifest: Manifest, **options: Any) -> Share:
    return Share(name="train", fingerprint=manifest.fingerprint, samples=len(manifest), **options)


def kind_of(what: Any) -> type | None:
    """The kind of error that a raw Flight call is refused with."""
    with pytest.raises(flight.FlightError) as caught:
        what()
    return type(decode_error(caught.value.extra_info))


class TestAnyFlightClient:
    def test_list_and_info(self, plain: flight.FlightClient, manifest: Manifest) -> None:
        train, tail = list(plain.list_flights())
        assert [info.total_records for info in (train, tail)] == [ROWS, 7]
        found = plain.get_flight_info(flight.FlightDescriptor.for_path("train"))
        assert found.schema == train.schema == plain.get_schema(flight.FlightDescriptor.for_path("train")).schema
        assert found.total_bytes == manifest.nbytes

    def test_actions(self, plain: flight.FlightClient, manifest: Manifest) -> None:
        assert {action.type for action in plain.list_actions()} == {"health", "prefix"}
        [result] = plain.do_action(flight.Action("health", b""))
        assert json.loads(result.body.to_pybytes()) == {"status": "ok", "datasets": 2}

    @pytest.mark.parametrize(
        "ticket, message",
        [
            (b"", "not valid JSON"),
            (random.Random(7).randbytes(100), "not valid JSON"),
            (b"{}", "version"),
            (b"x" * 100_000, "100000 bytes"),
            (b"/etc/passwd", "not valid JSON"),
        ],
    )
    def test_malformed_commands(self, plain: flight.FlightClient, ticket: bytes, message: str) -> None:
        _, reader = plain.do_exchange(flight.FlightDescriptor.for_command(ticket))
        with pytest.raises(flight.FlightServerError, match=message) as caught:
            reader.read_chunk()
        assert isinstance(decode_error(caught.value.extra_info), TicketError)

    def test_copies_without_a_cache(self, plain: flight.FlightClient) -> None:
        _, reader = plain.do_exchange(flight.FlightDescriptor.for_command(encode_key("(cache)", "0" * 32)))
        with pytest.raises(flight.FlightServerError, match="has no cache: run penstock serve --cache") as caught:
            reader.read_chunk()
        assert isinstance(decode_error(caught.value.extra_info), UnknownDataSetError)

    def test_other_nonsense(self, plain: flight.FlightClient) -> None:
        path, command = flight.FlightDescriptor.for_path, flight.FlightDescriptor.for_command
        assert kind_of(lambda: list(plain.list_flights(b"all"))) is TicketError
        assert kind_of(lambda: plain.get_flight_info(path("nothing"))) is UnknownDataSetError
        assert kind_of(lambda: plain.get_flight_info(path("..", "train"))) is TicketError
        assert kind_of(lambda: plain.get_flight_info(path())) is TicketError
        assert kind_of(lambda: plain.get_flight_info(command(b"[1]"))) is TicketError
        assert kind_of(lambda: list(plain.do_action(flight.Action("delete", b"")))) is TicketError
        assert kind_of(lambda: list(plain.do_action(flight.Action("prefix", b"{}")))) is TicketError

    @pytest.mark.parametrize("numbers", [[-1], [ROWS], [0, 1 << 62], [-(1 << 63)]])
    def test_rows_outside(self, plain: flight.FlightClient, numbers: list[int]) -> None:
        writer, reader = plain.do_exchange(flight.FlightDescriptor.for_path("train"))
        writer.write_metadata(pa.py_buffer(np.array(numbers, "<i8")))
        with pytest.raises(flight.FlightServerError, match=f"row {max(numbers, key=abs)} was requested"):
            reader.read_chunk()
        with pytest.raises(flight.FlightServerError):
            writer.close()

    def test_exchange_of_something_else(self, plain: flight.FlightClient) -> None:
        writer, reader = plain.do_exchange(flight.FlightDescriptor.for_path("train"))
        writer.write_metadata(b"12345")
        assert kind_of(reader.read_chunk) is TicketError
        assert kind_of(writer.close) is TicketError
        writer, reader = plain.do_exchange(flight.FlightDescriptor.for_path("train"))
        writer.begin(pa.schema([("x", pa.int32())]))
        writer.write_batch(pa.record_batch([pa.array([1], pa.int32())], names=["x"]))
        assert kind_of(reader.read_chunk) is TicketError
        assert kind_of(writer.close) is TicketError

    def test_put_is_not_there(self, plain: flight.FlightClient) -> None:
        with pytest.raises((NotImplementedError, pa.ArrowNotImplementedError)):
            writer, _ = plain.do_put(flight.FlightDescriptor.for_path("train"), pa.schema([]))
            writer.close()

    def test_the_server_is_unharmed(self, plain: flight.FlightClient) -> None:
        assert len(list(plain.list_flights())) == 2


class TestRows:
    @pytest.mark.parametrize(
        "shuffle", [{}, {"shuffle": "none"}, {"shuffle": "block", "block": {"block_size": 16, "window": 3}}]
    )
    @pytest.mark.parametrize("remainder", ["pad", "drop", "uneven"])
    def test_all_shares_together_are_the_epoch(
        self, server: Server, manifest: Manifest, shuffle: dict[str, Any], remainder: str
    ) -> None:
        got: list[bytes] = []
        with Client(server.address) as client:
            for rank in range(3):
                for mini_epoch in range(2):
                    part = part_of(
                        manifest, world_size=3, rank=rank, mini_epochs=2, mini_epoch=mini_epoch, seed=5, **shuffle
                    )
                    part = replace(part, remainder=remainder)
                    found = lines(pages_of(client, part))
                    assert found == expected(manifest, part)
                    got += found
        extra = {"pad": 4, "drop": -2, "uneven": 0}[remainder]
        assert len(got) == ROWS + extra
        assert len(set(got)) == min(ROWS, ROWS + extra)

    def test_message_bytes(self, tmp_path: Path) -> None:
        path = tmp_path / "long.txt"
        path.write_text("".join(f"{'x' * (50_000 if k % 100 == 7 else 5)}{k}.jpg {k}\n" for k in range(1000)))
        manifest, seen = Manifest.open(path), Counting()
        limits = Limits(message_bytes=20_000)
        with Server({"train": path}, limits=limits, observer=seen) as server, Client(server.address) as client:
            assert lines(pages_of(client, part_of(manifest))) == expected(manifest, part_of(manifest))
            batch = client.rows("train", manifest.fingerprint, range(1000))
            assert batch.column(0).to_pylist() == manifest.raw(range(1000)).to_pylist()
        assert seen.sent == 2000
        assert all(nbytes <= 20_000 or count == 1 for count, nbytes in seen.sizes)

    @full_only("long rows for each", but=["text"])
    @pytest.mark.parametrize("kind", ["text", "parquet", "several"])
    def test_long_rows_are_not_gathered_together(
        self, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """However often one is named: a request has 8 bytes for each."""
        paths = [f"{'x' * (40_000 if k == 7 or 5000 < k < 5100 else 5)}{k}.jpg" for k in range(10_000)]
        names = []
        for number, some in enumerate([paths[:4000], paths[4000:]] if kind == "several" else [paths]):
            names.append(tmp_path / f"{number}.{'parquet' if kind == 'parquet' else 'txt'}")
            if kind == "parquet":
                parquet.write_table(pa.table({"path": some, "label": [0] * len(some)}), names[-1], row_group_size=3000)
            else:
                names[-1].write_text("".join(f"{path} 0\n" for path in some))
        manifest, most = Manifest.open(names), 0
        gather = Manifest.gather

        def watched(self: Manifest, *arguments: Any) -> pa.RecordBatch:
            nonlocal most
            batch = gather(self, *arguments)
            most = max(most, batch.nbytes)
            return batch

        wanted, seen = [0, *[7] * 200, *range(5050, 5100), *[7] * 50, 9], Counting()
        limits = Limits(message_bytes=200_000)
        with Server({"train": manifest}, limits=limits, observer=seen) as server, Client(server.address) as client:
            monkeypatch.setattr(Manifest, "gather", watched)
            for rows in (wanted, [7] * 200, [7] * 9, [7], range(4990, 5110)):
                found = client.rows("train", manifest.fingerprint, rows)
                assert found.equals(gather(manifest, rows))
            batches = list(pages_of(client, part_of(manifest, shuffle="none")))
            assert pa.Table.from_batches(batches).equals(pa.Table.from_batches([gather(manifest, range(10_000))]))
        assert all(nbytes <= 200_000 for _, nbytes in seen.sizes)
        assert most < 400_000  # of a few rows the size is not looked at

    def test_memory_is_bounded_by_pages(self, tmp_path: Path) -> None:
        manifest = Manifest.open(write_lines(tmp_path / "train.txt", 300_000))
        before = pa.total_allocated_bytes()
        with Server({"train": manifest}) as server, Client(server.address) as client:
            most = max(pa.total_allocated_bytes() for _ in pages_of(client, part_of(manifest, page_rows=4096)))
        assert most - before < 32 * 4096 * 30


class TestLimits:
    def test_page_rows(self, manifest: Manifest) -> None:
        with Server({"train": manifest}, limits=Limits(page_rows=64)) as server, Client(server.address) as client:
            assert lines(pages_of(client, part_of(manifest, page_rows=64))) == expected(manifest, part_of(manifest))
            with pytest.raises(ServerLimitError, match="65 rows"):
                client.rows("train", manifest.fingerprint, range(65))

    def test_streams(self, tmp_path: Path) -> None:
        # More than gRPC takes in for a client that does not read: a stream has ended when all of it is written.
        manifest = Manifest.open(write_lines(tmp_path / "train.txt", 1_500_000))
        with Server({"train": manifest}, limits=Limits(streams=2)) as server:
            client = Client(server.address, patience=0.3, timeout=60)
            first, second = (pages_of(client, part_of(manifest)) for _ in range(2))
            next(first), next(second)
            with pytest.raises(ServerUnavailableError, match="has 2 streams, its limit"):
                next(pages_of(client, part_of(manifest)))
            first.close()
            third = pages_of(Client(server.address), part_of(manifest))  # is patient
            assert next(third).num_rows
            second.close(), third.close()

    def test_limits_are_positive(self) -> None:
        with pytest.raises(ConfigError, match="positive"):
            Limits(streams=0)

    def test_a_slow_client_does_not_hold_up_others(self, tmp_path: Path) -> None:
        manifest = Manifest.open(write_lines(tmp_path / "train.txt", 300_000))
        part = part_of(manifest)
        with Server({"train": manifest}) as server, Client(server.address) as client:
            slow = [pages_of(Client(server.address), part) for _ in range(20)]
            for one in slow:
                next(one)  # and no more
            assert sum(batch.num_rows for batch in pages_of(client, part)) == len(manifest)
            for one in slow:
                one.close()


class TestObserver:
    def test_a_slow_disk_does_not_slow_other_data_sets(
        self, manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        slow, ended = Manifest.open(write_lines(tmp_path / "slow.txt", 4000)), threading.Event()
        gather = Manifest.gather

        def waiting(self: Manifest, rows: Any, *more: Any) -> pa.RecordBatch:
            if self is slow and len(rows):
                ended.wait(30)
            return gather(self, rows, *more)

        monkeypatch.setattr(Manifest, "gather", waiting)
        part = Share(name="slow", fingerprint=slow.fingerprint, samples=4000, page_rows=1000)
        with (
            Server({"train": manifest, "slow": slow}) as server,
            Client(server.address, timeout=60) as client,
            ThreadPoolExecutor(12) as pool,
        ):
            try:
                others = [pool.submit(lambda: lines(pages_of(client, part))) for _ in range(12)]
                time.sleep(0.3)
                whole = part_of(manifest, page_rows=1000)
                assert lines(pages_of(client, whole)) == expected(manifest, whole)
                assert client.rows("train", manifest.fingerprint, range(2000)).num_rows == 2000
                assert not any(other.done() for other in others)
            finally:
                ended.set()
            assert all(other.result() == expected(slow, part) for other in others)

    def test_is_told(self, manifest: Manifest) -> None:
        seen = Counting()
        with Server({"train": manifest}, observer=seen) as server, Client(server.address) as client:
            list(pages_of(client, part_of(manifest)))
            eventually(lambda: (seen.streams, seen.open, seen.sent) == (1, 0, ROWS))
            client.rows("train", manifest.fingerprint, [1, 2])
            assert (seen.streams, seen.open, seen.sent) == (2, 1, ROWS + 2)
            client.close()
            eventually(lambda: seen.open == 0)
            with pytest.raises(UnknownDataSetError):
                client.info("nothing")
            assert seen.errors == ["UnknownDataSetError"]

    def test_streams_that_are_left_end(self, tmp_path: Path) -> None:
        manifest, seen = Manifest.open(write_lines(tmp_path / "train.txt", 300_000)), Counting()
        with Server({"train": manifest}, observer=seen) as server, Client(server.address) as client:
            for count in (0, 1, 3):
                stream = pages_of(client, part_of(manifest))
                for _ in range(count):
                    next(stream)
                stream.close()
            with flight.connect(server.address) as plain:
                plain.do_exchange(flight.FlightDescriptor.for_path("train"))  # and away
            eventually(lambda: (seen.streams, seen.open) == (4, 0), 15)
            assert seen.errors == []

    def test_errors_inside_are_no_secret_to_the_operator(
        self, manifest: Manifest, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Broken(Counting):
            def rows(self, name: str, count: int, nbytes: int) -> None:
                raise ZeroDivisionError("in the observer")

        seen = Broken()
        message = r"failed \(ZeroDivisionError\); its log has more"
        with Server({"train": manifest}, observer=seen) as server, pytest.raises(ServerError, match=message):
            list(pages_of(Client(server.address), part_of(manifest)))
        assert seen.errors == ["InternalError"]
        assert "in the observer" in caplog.text


class TestEnd:
    def test_answers_finish(self, manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
        begun, ended = threading.Event(), threading.Event()
        gather = Manifest.gather

        def waiting(self: Manifest, rows: Any, *more: Any) -> pa.RecordBatch:
            if len(rows):
                begun.set()
                ended.wait(HANG)
            return gather(self, rows, *more)

        server = Server({"train": manifest})
        monkeypatch.setattr(Manifest, "gather", waiting)
        client = Client(server.address, patience=0, timeout=HANG)
        with ThreadPoolExecutor(2) as pool:
            answer = pool.submit(client.rows, "train", manifest.fingerprint, [5, 3])
            assert begun.wait(HANG)
            closing = pool.submit(server.close, grace=HANG)
            eventually(lambda: Client(server.address, timeout=1).health()[server.address] != "ok")
            assert not closing.done()
            ended.set()
            assert answer.result().column(0).to_pylist() == manifest.raw([5, 3]).to_pylist()

    def test_grace_is_bounded(self, tmp_path: Path) -> None:
        path = tmp_path / "long.txt"
        path.write_text(f"{'x' * 50_000}.jpg 1\n")
        manifest = Manifest.open(path)
        server = Server({"train": manifest})
        client = Client(server.address)
        client.rows("train", manifest.fingerprint, [0])  # leaves a stream open
        stalled = client.batches("train", manifest.fingerprint, [[0] * 1000] * 3)
        next(stalled)  # two answers of 50 MB remain, and gRPC may take one of them
        server.close(grace=0.5)  # and not for ever
        server.close()
        assert server.wait(0)
        stalled.close()  # type: ignore[attr-defined]
        client.close()

    def test_idle_streams_are_not_waited_for(self, manifest: Manifest) -> None:
        server = Server({"train": manifest})
        clients = [Client(server.address) for _ in range(5)]
        for client in clients:
            client.rows("train", manifest.fingerprint, random_rows(ROWS, 9))
        server.close(grace=3600)
        with pytest.raises(ServerUnavailableError):
            Client(server.address, timeout=0.5).info()

    def test_a_program_that_ends_with_a_server_open(self, tmp_path: Path) -> None:
        """It tells its clients to come again, and writes no traceback."""
        path = write_lines(tmp_path / "train.txt", 50_000)
        program = """
import sys
from penstock.server import Client, Server
server = Server({"train": sys.argv[1]})
client = Client(server.address, timeout=1)
info = client.info()
stream = client.batches("train", info.fingerprint, [range(100)] * 100)
next(stream)
"""
        done = run(["-c", program, str(path)], timeout=HANG, imports=SERVES)
        assert (done.returncode, done.stderr) == (0, "")

    def test_wait(self, manifest: Manifest) -> None:
        with Server({"train": manifest}) as server:
            assert not server.wait(0.01)
            threading.Timer(0.1, server.close).start()
            assert server.wait(10)


class TestArguments:
    def test_nothing_to_serve(self) -> None:
        with pytest.raises(ConfigError, match="nothing to serve"):
            Server({})

    @pytest.mark.parametrize("name", ["", "a\nb", "x" * 300, "(cache)"])
    def test_names(self, manifest: Manifest, name: str) -> None:
        with pytest.raises(ConfigError, match="dataset name"):
            Server({name: manifest})

    def test_a_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(ManifestError, match=r"none\.txt"):
            Server({"x": tmp_path / "none.txt"})

    def test_lines_and_columns_together(self, tmp_path: Path) -> None:
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"path": ["a"], "label": [1]}), tmp_path / "a.parquet")
        mixed = Manifest.open([tmp_path / "a.parquet", write_lines(tmp_path / "b.txt", 3)])
        with pytest.raises(ManifestError, match="partly lines"):
            Server({"x": mixed})

    def test_a_port_that_is_taken(self, server: Server, manifest: Manifest) -> None:
        port = int(server.address.rpartition(":")[2])
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: another program listens"):
            Server({"x": manifest}, port=port)

    def test_an_address_of_some_other_machine(self, manifest: Manifest) -> None:
        with pytest.raises(ConfigError, match=r"cannot listen on 192.0.2.1:0: Cannot assign"):
            Server({"x": manifest}, host="192.0.2.1", insecure=True)

    @pytest.mark.parametrize("host", ["::1", "[::1]"])
    def test_ipv6(self, manifest: Manifest, host: str) -> None:
        try:
            server = Server({"train": manifest}, host=host)
        except ConfigError:
            pytest.skip("no IPv6 here")
        with server:
            assert server.address.startswith("grpc://[::1]:")
            assert Client(server.address).info().rows == ROWS
