"""``penstock serve`` as people, systemd and Kubernetes use it: a real process, its signals, files and exit codes."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from busy_support import HANG
from full_run import full_only
from interpreter_support import SERVES, Popen, run
from pyarrow import flight
from server_support import Share, pages_of

from penstock.errors import ConfigError, ServerAuthError, ServerError, ServerUnavailableError
from penstock.server import Client
from penstock.server.protocol import encode_key, encode_rows
from penstock.tools.cli.serve import named_files

DEADLINE = 120
FOREVER = 3600  # seconds of grace that nobody waits for


class Serve:
    """One process, and what it wrote."""

    def __init__(self, folder: Path, *arguments: object) -> None:
        environment = {**os.environ, "NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "100"}
        self.log = folder / f"serve-{time.monotonic_ns()}.log"
        with self.log.open("wb") as log:
            self.process = Popen(
                ["-m", "penstock", "serve", "--port", "0", *map(str, arguments)],
                imports=SERVES,
                cwd=folder,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=log,
            )

    def address(self) -> str:
        """Where it listens, as it says on standard output."""
        return self.said("listening on ")

    def said(self, begin: str) -> str:
        """The last word of the first line of standard output that begins so."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(begin):
                return str(line.split()[-1])
        raise AssertionError(self.log.read_text())

    def lines(self) -> list[str]:
        return self.log.read_text().splitlines()

    def wait_for(self, event: str) -> str:
        """The first line of the log with an event."""
        deadline = time.monotonic() + DEADLINE
        while time.monotonic() < deadline:
            for line in self.lines():
                if event in line:
                    return line
            time.sleep(0.02)
        raise AssertionError(f"no {event!r} in {self.log.read_text()}")

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=DEADLINE)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Serve]]:
    started: list[Serve] = []

    def start(*arguments: object) -> Serve:
        started.append(Serve(tmp_path, *arguments))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait()
        assert one.process.stdout is not None
        one.process.stdout.close()


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A manifest of a long row: a message of an answer has a thousand of it, 50 MB."""
    path = tmp_path_factory.mktemp("long") / "train.txt"
    path.write_text(f"{'x' * 50_000}.jpg 1\n")
    return path


@contextmanager
def stalled(address: str) -> Iterator[None]:
    """A client that reads the first of eight messages of an answer: gRPC may take one or two more by itself."""
    with Client(address, patience=1) as client:
        command = encode_key("train", client.info().fingerprint)
    with flight.connect(address) as call:
        writer, reader = call.do_exchange(flight.FlightDescriptor.for_command(command))
        writer.write_metadata(encode_rows(np.zeros(8000, np.int64)))
        assert reader.read_chunk().data.num_rows == 1000
        yield
        reader.cancel()


@pytest.fixture
def meta(write_manifest: Callable[..., Path]) -> Path:
    return write_manifest(200, "train.txt")


def ask(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def request(client: Client, name: str = "train", **more: Any) -> Share:
    info = client.info(name)
    return Share(name=name, fingerprint=info.fingerprint, samples=info.rows, shuffle="none", **more)


def rows_of(client: Client, name: str = "train") -> int:
    return sum(batch.num_rows for batch in pages_of(client, request(client, name)))


class TestServes:
    def test_several_data_sets_by_name(self, serve: Callable[..., Serve], meta: Path, tmp_path: Path) -> None:
        (tmp_path / "lists").mkdir()
        for part in "ab":
            (tmp_path / "lists" / f"{part}.txt").write_text("x.jpg 1\n" * 30)
        server = serve(meta, "--name", "both=lists/*.txt")
        with_client = Client(server.address())
        assert {info.name: info.rows for info in with_client.list()} == {"train": 200, "both": 60}
        assert rows_of(with_client, "both") == 60
        with_client.close()

    def test_ready_file_has_the_address_while_it_listens(
        self, serve: Callable[..., Serve], meta: Path, tmp_path: Path
    ) -> None:
        ready = tmp_path / "ready"
        ready.write_text("grpc://127.0.0.1:1\n")  # of one that was killed
        server = serve(meta, "--ready-file", ready)
        address = server.address()
        deadline = time.monotonic() + DEADLINE
        while not ready.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert ready.read_text() == f"{address}\n"
        assert re.fullmatch(r"grpc://127\.0\.0\.1:\d+", address)
        client = Client(ready.read_text().strip())
        assert rows_of(client) == 200
        client.close()
        assert server.stop() == 0
        assert not ready.exists()
        assert not list(tmp_path.glob(".ready*"))

    def test_reading_options_reach_the_reader(self, serve: Callable[..., Serve], tmp_path: Path) -> None:
        (tmp_path / "table.csv").write_text("# exported\nfile,class\na.jpg,cat\nb.jpg,dog\n")
        options = ("--columns", "path=file, label=class", "--label", "str", "--comment", "#", "--header", "yes")
        client = Client(serve("table.csv", *options).address())
        (info,) = client.list()
        assert (info.name, info.rows, str(info.schema.field("label").type)) == ("table", 2, "string")
        client.close()

    def test_token(self, serve: Callable[..., Serve], meta: Path, tmp_path: Path) -> None:
        (tmp_path / "token").write_text("long-and-secret\n")
        server = serve(meta, "--token-file", "token", "--metrics-port", 0)
        address = server.address()
        good, bad = Client(address, token="long-and-secret"), Client(address, token="wrong")
        assert rows_of(good) == 200
        with pytest.raises(ServerAuthError):
            bad.list()
        assert "long-and-secret" not in server.log.read_text()
        status = server.said("status page")
        assert re.search(r'errors_total\{dataset="",kind="ServerAuthError"\} [1-9]', ask(status + "metrics")[1])
        good.close()
        bad.close()

    @pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl")
    def test_tls(self, serve: Callable[..., Serve], meta: Path, tmp_path: Path) -> None:
        command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -keyout key.pem -out cert.pem"
        name = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
        subprocess.run([*command.split(), *name], cwd=tmp_path, check=True, capture_output=True)
        server = serve(meta, "--tls-cert", "cert.pem", "--tls-key", "key.pem")
        address = server.address()
        assert address.startswith("grpc+tls://127.0.0.1:")
        client = Client(address, tls_roots=tmp_path / "cert.pem")
        assert rows_of(client) == 200
        client.close()

        # Mutual, and then no token is needed on other addresses. The one certificate does for all.
        options = ("--tls-cert", "cert.pem", "--tls-key", "key.pem", "--tls-client-ca", "cert.pem", "--host", "0.0.0.0")
        port = serve(meta, *options).address().rpartition(":")[2]
        address, own = (
            f"grpc+tls://127.0.0.1:{port}",
            {"tls_cert": tmp_path / "cert.pem", "tls_key": tmp_path / "key.pem"},
        )
        client = Client(address, tls_roots=tmp_path / "cert.pem", **own)
        assert rows_of(client) == 200
        client.close()
        with pytest.raises(ServerError):
            Client(address, tls_roots=tmp_path / "cert.pem", timeout=3, patience=1).list()

    def test_max_streams(self, serve: Callable[..., Serve], meta: Path) -> None:
        address = serve(meta, "--max-streams", 2).address()
        clients = [Client(address, patience=0) for _ in range(3)]
        fingerprint = clients[0].info().fingerprint
        for client in clients[:2]:
            client.rows("train", fingerprint, [0])
        with pytest.raises(ServerUnavailableError, match="it has 2 streams, its limit"):
            clients[2].rows("train", fingerprint, [0])
        for client in clients:
            client.close()

    def test_status_page(self, serve: Callable[..., Serve], meta: Path) -> None:
        server = serve(meta, "--metrics-port", 0)
        client = Client(server.address())
        assert rows_of(client) == 200
        url = server.said("status page")
        assert url.startswith("http://127.0.0.1:")
        code, page = ask(url)
        assert code == 200
        assert "train" in page
        assert str(meta.parent) not in page  # names, no paths
        assert 'penstock_server_rows_total{dataset="train"} 200.0' in ask(url + "metrics")[1]
        assert ask(url + "health") == (200, "ok\n")
        client.close()

    def test_metrics_need_their_extra(self, meta: Path, tmp_path: Path) -> None:
        (tmp_path / "prometheus_client.py").write_text("raise ImportError('not installed')\n")
        program = (
            "import sys; sys.path.insert(0, '.'); sys.argv[1:] = ['serve', 'train.txt', '--metrics-port', '0']\n"
            "from penstock.tools.cli import main; main()"
        )
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=HANG)
        assert done.returncode == 1
        assert "pip install 'penstock[metrics]'" in done.stderr


class TestSignals:
    @pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
    def test_stops_at_once_when_nothing_is_sent(
        self, serve: Callable[..., Serve], meta: Path, number: signal.Signals, code: int
    ) -> None:
        server = serve(meta, "--grace", FOREVER)
        server.address()
        server.wait_for("listening")
        assert server.stop(number) == code
        listening, stopping, stopped = server.lines()
        assert "INFO" in listening
        assert number.name in stopping
        assert stopped.endswith("stopped")

    def test_health_while_it_stops(self, serve: Callable[..., Serve], long: Path) -> None:
        server = serve(long, "--grace", FOREVER, "--metrics-port", 0)
        with stalled(server.address()):
            url = server.said("status page")
            server.process.send_signal(signal.SIGTERM)
            server.wait_for("stopping")
            assert ask(url + "health")[0] == 503

    def test_an_answer_that_nobody_reads_ends_with_the_grace(self, serve: Callable[..., Serve], long: Path) -> None:
        server = serve(long, "--grace", 1)
        with stalled(server.address()):
            started = time.monotonic()
            assert server.stop() == 0
            assert time.monotonic() - started > 0.9

    def test_connections_that_wait_for_a_request_are_not_waited_for(
        self, serve: Callable[..., Serve], meta: Path
    ) -> None:
        server = serve(meta, "--grace", FOREVER)
        client = Client(server.address(), timeout=30)
        info = client.info("train")
        assert client.rows("train", info.fingerprint, [5, 3]).num_rows == 2
        server.wait_for("listening")
        assert server.stop() == 0
        client.close()

    def test_a_second_signal_does_not_wait(self, serve: Callable[..., Serve], long: Path) -> None:
        server = serve(long, "--grace", FOREVER)
        with stalled(server.address()):
            server.process.send_signal(signal.SIGTERM)
            server.wait_for("stopping")
            time.sleep(0.1)
            assert server.stop() == -signal.SIGTERM

    def test_reload_keeps_the_old_version_for_those_who_use_it(
        self, serve: Callable[..., Serve], meta: Path, tmp_path: Path
    ) -> None:
        server = serve(meta, "--metrics-port", 0)
        address = server.address()
        status = server.said("status page")
        client = Client(address)
        old = request(client)
        (tmp_path / "new.txt").write_text("new.jpg 7\n" * 300)
        os.replace(tmp_path / "new.txt", meta)
        server.wait_for("listening")
        server.process.send_signal(signal.SIGHUP)
        line = server.wait_for("reloaded")
        fresh = Client(address)
        assert fresh.info("train").rows == 300
        assert fresh.info("train").fingerprint != old.fingerprint
        assert line.endswith(f"reloaded: train is {fresh.info('train').fingerprint}")
        assert rows_of(fresh) == 300
        assert sum(batch.num_rows for batch in pages_of(client, old)) == 200
        assert "300" in ask(status)[1]
        client.close()
        fresh.close()

    def test_a_reload_that_fails_is_told_and_keeps_the_version(
        self, serve: Callable[..., Serve], meta: Path, tmp_path: Path
    ) -> None:
        other = tmp_path / "other.txt"
        other.write_text("x.jpg 1\n" * 5)
        server = serve(meta, other)
        client = Client(server.address())
        server.wait_for("listening")
        meta.rename(tmp_path / "elsewhere.txt")
        other.unlink()
        other.write_text("x.jpg 1\n" * 9)
        server.process.send_signal(signal.SIGHUP)
        line = server.wait_for("reload failed")
        assert "train.txt" in line
        assert "reloaded: other is " in server.wait_for("reloaded")
        assert rows_of(client) == 200
        assert rows_of(client, "other") == 9
        client.close()
        assert server.stop() == 0

    @full_only("waits for seconds")
    def test_reload_while_streaming(self, serve: Callable[..., Serve], write_manifest: Callable[..., Path]) -> None:
        server = serve(write_manifest(1_000_000, "train.txt"))
        client = Client(server.address())
        server.wait_for("listening")
        wanted = request(client)
        got: list[int] = []
        thread = threading.Thread(target=lambda: got.append(sum(b.num_rows for b in pages_of(client, wanted))))
        thread.start()
        for _ in range(5):
            server.process.send_signal(signal.SIGHUP)
            time.sleep(0.05)
        thread.join(timeout=DEADLINE)
        assert got == [1_000_000]
        client.close()


class TestRefuses:
    def run(self, folder: Path, *arguments: object, code: int = 1) -> str:
        command = ["-m", "penstock", "serve", *map(str, arguments)]
        environment = {**os.environ, "NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "200"}
        done = run(command, imports=SERVES, cwd=folder, env=environment, timeout=HANG)
        assert done.returncode == code, done.stdout + done.stderr
        assert done.stdout == ""
        if code == 1:
            assert done.stderr.startswith("error: ")
            assert done.stderr.count("\n") == 1
        return done.stderr

    @full_only("a program for each", but=["0.0.0.0"])
    @pytest.mark.parametrize("host", ["0.0.0.0", "::"])
    def test_other_addresses_without_a_token(self, meta: Path, tmp_path: Path, host: str) -> None:
        ready = tmp_path / "ready"
        error = self.run(tmp_path, meta, "--host", host, "--ready-file", ready)
        assert host in error
        assert "--insecure" in error
        assert not ready.exists()

    def test_but_not_with_insecure(self, serve: Callable[..., Serve], meta: Path) -> None:
        server = serve(meta, "--host", "0.0.0.0", "--insecure")
        port = server.address().rpartition(":")[2]
        assert "WARNING" in server.wait_for("insecure")
        client = Client(f"grpc://127.0.0.1:{port}")
        assert rows_of(client) == 200
        client.close()

    def test_nor_with_a_token_which_is_a_warning_without_tls(
        self, serve: Callable[..., Serve], meta: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "token").write_text("secret")
        server = serve(meta, "--host", "0.0.0.0", "--token-file", "token")
        server.address()
        assert "token" in server.wait_for("insecure")

    @full_only("a program for each", but=["arguments0-words0", "arguments6-words6", "arguments11-words11"])
    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ((), ["nothing to serve"]),
            (("missing.txt",), ["missing.txt"]),
            (("train.txt", "sub/train.txt"), ["'train'", "--name"]),
            (("train.txt", "--name", "train=other.txt"), ["'train'", "other.txt"]),
            (("*.txt",), ["pattern", "--name"]),
            (("--name", "train.txt"), ["NAME=FILE"]),
            (("train.txt", "--tls-cert", "cert.pem"), ["--tls-key"]),
            (("train.txt", "--tls-client-ca", "ca.pem"), ["--tls-cert"]),
            (("train.txt", "--tls-cert", "no.pem", "--tls-key", "no.pem"), ["no.pem"]),
            (("train.txt", "--token-file", "no-token"), ["no-token"]),
            (("train.txt", "--token-file", "empty"), ["empty"]),
            (("train.txt", "--metrics-host", "127.0.0.1"), ["--metrics-port"]),
            (("train.txt", "--log-json"), ["logging.Formatter"]),
            (("train.txt", "--host", "no.such.host.invalid"), ["no.such.host.invalid"]),
            (("train.txt", "--port", "0", "--ready-file", "nowhere/ready"), ["nowhere/ready"]),
        ],
    )
    def test_senseless(self, meta: Path, tmp_path: Path, arguments: tuple[str, ...], words: list[str]) -> None:
        (tmp_path / "empty").write_text("\n")
        error = self.run(tmp_path, *arguments)
        assert all(word in error for word in words), error

    @full_only("a program for each", but=["--port"])
    @pytest.mark.parametrize("option", ["--port", "--metrics-port"])
    def test_a_port_that_is_taken(self, serve: Callable[..., Serve], meta: Path, tmp_path: Path, option: str) -> None:
        port = serve(meta).address().rpartition(":")[2]
        assert port in self.run(tmp_path, meta, option, port)

    @full_only("a program for each", but=["arguments3"])
    @pytest.mark.parametrize(
        "arguments", [("--port", "70000"), ("--grace", "-1"), ("--log-level", "loud"), ("--nope",)]
    )
    def test_senseless_options(self, meta: Path, tmp_path: Path, arguments: tuple[str, ...]) -> None:
        assert arguments[0] in self.run(tmp_path, meta, *arguments, code=2)


class TestNames:
    def test_stems_and_given_names(self) -> None:
        found = named_files(["lists/train.txt", "val.jsonl"], ["test = a=b.txt", "all=lists/*.txt"])
        assert found == {"train": "lists/train.txt", "val": "val.jsonl", "test": "a=b.txt", "all": "lists/*.txt"}

    @pytest.mark.parametrize("name", ["=x.txt", "x=", " = ", "x"])
    def test_half_a_pair(self, name: str) -> None:
        with pytest.raises(ConfigError, match="NAME=FILE"):
            named_files([], [name])
