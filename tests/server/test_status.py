"""What a server counts for Prometheus, and its status page: by HTTP, and in a browser."""

from __future__ import annotations

import http.client
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from urllib.parse import urlsplit

import cv2
import numpy as np
import prometheus_client
import pytest
from browser_support import BROWSER, browse
from busy_support import HANG
from full_run import full_only
from prometheus_client.parser import text_string_to_metric_families

from penstock.errors import ConfigError, ServerChangedError
from penstock.server import Client, Server
from penstock.server.status import Metrics, status_server

BAD = '<img src=x onerror="alert(1)">'


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def server(metrics: Metrics, write_manifest: Callable[..., Path]) -> Iterator[Server]:
    path = write_manifest(200, "train.txt")
    with Server({"train": path, BAD: path}, observer=metrics) as server:
        yield server


@pytest.fixture
def url(server: Server, metrics: Metrics) -> Iterator[str]:
    with status_server(server, metrics) as url:
        yield url


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.address) as client:
        yield client


def ask(url: str, path: str = "/", method: str = "GET") -> tuple[int, str, dict[str, str]]:
    where = urlsplit(url)
    with closing(http.client.HTTPConnection(where.hostname or "", where.port, timeout=HANG)) as connection:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), dict(answer.headers)


def connect(url: str) -> socket.socket:
    where = urlsplit(url)
    return socket.create_connection((where.hostname or "", where.port or 0), timeout=20)


class TestMetrics:
    def test_counts_of_a_read(self, url: str, client: Client, metrics: Metrics) -> None:
        fingerprint = client.info("train").fingerprint
        client.rows("train", fingerprint, [5, 3, 5])
        values = {name: metrics.value(name, "train") for name in ("rows_total", "streams_total", "active_streams")}
        assert values == {"rows_total": 3, "streams_total": 1, "active_streams": 1}
        assert metrics.value("bytes_total", "train") > 30
        client.close()
        deadline = time.monotonic() + HANG
        while metrics.value("active_streams", "train") and time.monotonic() < deadline:
            time.sleep(0.01)
        assert metrics.value("active_streams", "train") == 0
        assert 'penstock_server_rows_total{dataset="train"} 3.0' in ask(url, "/metrics")[1]

    def test_text_is_valid_and_counts_begin_at_0(self, url: str, server: Server) -> None:
        code, text, headers = ask(url, "/metrics")
        assert code == 200
        assert headers["Content-Type"].startswith("text/plain")
        families = {family.name: family for family in text_string_to_metric_families(text)}
        rows = {one.labels["dataset"]: one.value for one in families["penstock_server_rows"].samples}
        assert rows["train"] == rows[BAD] == 0
        [train, _] = families["penstock_server_dataset_rows"].samples
        assert (train.labels["fingerprint"], train.value) == (server.datasets[0].fingerprint, 200)
        assert "process_resident_memory_bytes" in families

    def test_errors_by_kind_and_only_by_served_names(self, client: Client, metrics: Metrics) -> None:
        with pytest.raises(ServerChangedError):
            client.rows("train", "0" * 32, [0])
        for name in ("../../etc/passwd", "<script>"):
            with suppress(Exception):
                client.info(name)
        text = prometheus_client.generate_latest(metrics.registry).decode()
        assert set(re.findall(r'errors_total\{dataset="([^"]*)"', text)) <= {"", "train"}
        assert 'errors_total{dataset="",kind="UnknownDataSetError"} 2.0' in text

    def test_threads(self, metrics: Metrics) -> None:
        def work() -> None:
            for _ in range(2000):
                metrics.stream_started("a", "ipv4:10.0.0.1:4000")
                metrics.rows("a", 3, 30)
                metrics.stream_ended("a", "ipv4:10.0.0.1:4000", None)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        names = ("rows_total", "bytes_total", "streams_total", "active_streams")
        assert [metrics.value(name, "a") for name in names] == [24_000, 240_000, 8000, 0]


class TestHttp:
    def test_page(self, url: str, server: Server, client: Client) -> None:
        fingerprint = client.info("train").fingerprint
        client.rows("train", fingerprint, np.arange(150))
        code, text, headers = ask(url)
        assert code == 200
        assert headers["Content-Type"] == "text/html; charset=utf-8"
        for part in (server.address, "<td>train</td>", "<td>200</td>", fingerprint[:12], "<td>150</td>"):
            assert part in text, part
        assert "http://" not in text
        assert "https://" not in text
        assert str(server.datasets[0].source) not in text  # names, no paths

    def test_names_are_text_and_no_script_runs(self, url: str) -> None:
        _, text, headers = ask(url)
        assert "<img" not in text
        assert "&lt;img src=x" in text
        assert headers["Content-Security-Policy"] == "default-src 'none'; style-src 'unsafe-inline'"

    def test_health(self, url: str, server: Server) -> None:
        assert ask(url, "/health")[:2] == (200, "ok\n")
        server.close()
        assert ask(url, "/health")[:2] == (503, "stopping\n")
        assert "stopping" in ask(url)[1]

    def test_head_has_no_body(self, url: str) -> None:
        code, text, headers = ask(url, "/metrics", "HEAD")
        assert (code, text) == (200, "")
        assert int(headers["Content-Length"]) > 100

    @pytest.mark.parametrize("path", ["/nothing", "/../../etc/passwd", "/health/", "/metrics%00"])
    def test_other_paths(self, url: str, path: str) -> None:
        assert ask(url, path)[0] == 404

    @pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
    def test_other_methods(self, url: str, method: str) -> None:
        assert ask(url, "/", method)[0] == 501

    @full_only("300 connections for each", but=["half"])
    @pytest.mark.parametrize(
        "said", [b"", b"GET /hea", b"GET / HTTP/1.1\r\nHost: x\r\n"], ids=["nothing", "half", "headers"]
    )
    def test_silent_clients_hold_nobody_up(self, url: str, said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("penstock.server.status._Handler.timeout", 1.0)
        many = [connect(url) for _ in range(300)]
        try:
            for one in many:
                one.sendall(said)
            assert ask(url, "/health")[:2] == (200, "ok\n")
            for one in many:  # ended by the server
                with suppress(ConnectionError):
                    assert one.recv(100) == b""
        finally:
            for one in many:
                one.close()

    def test_bytes_that_are_no_request(self, url: str) -> None:
        for data in (
            b"\x16\x03\x01\x02\x00\x01",
            b"GET\r\n\r\n",
            b"\0" * 70_000,
            b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 500,
        ):
            with connect(url) as connection:
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                with suppress(ConnectionError):
                    while connection.recv(65536):
                        pass
        assert ask(url, "/health")[0] == 200

    def test_a_port_that_is_taken(self, url: str, server: Server, metrics: Metrics) -> None:
        port = urlsplit(url).port or 0
        with pytest.raises(ConfigError, match=f"port {port}"), status_server(server, metrics, port=port):
            pass

    def test_the_end_of_the_block_ends_the_thread(self, server: Server, metrics: Metrics) -> None:
        with status_server(server, metrics):
            assert "penstock-status" in {thread.name for thread in threading.enumerate()}
        assert "penstock-status" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_page_in_a_browser(url: str, tmp_path: Path) -> None:
    browse(url, tmp_path, f"--screenshot={tmp_path / 'page.png'}")
    image = cv2.imread(str(tmp_path / "page.png"))
    assert image is not None
    assert image[5, 5].mean() > 230
    assert (image[60:300] < 100).any()  # the text of the table
    assert BAD in browse(url, tmp_path, "--dump-dom").replace("&lt;", "<").replace("&gt;", ">")
