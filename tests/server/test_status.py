"""The status page: by HTTP, and as a browser shows it."""

from __future__ import annotations

import http.client
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import cv2
import numpy as np
import pytest
from browser_support import BROWSER, DARK, browse
from busy_support import HANG
from full_run import full_only

from penstock.errors import ConfigError
from penstock.server.plot import area, short, ticks
from penstock.server.status import Status
from penstock.server.traffic import Traffic

pytest.importorskip("prometheus_client")


@dataclass
class DataSet:
    name: str
    rows: int
    fingerprint: str = "75d608d996bbee18d1f385751255366d"


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def traffic() -> Traffic:
    """Five minutes of 2 M rows/s, and one that failed."""
    clock = Clock()
    traffic = Traffic(clock=clock)
    traffic.serve(["train"])
    traffic.stream_started("train", "ipv4:10.0.0.7:4000")
    for second in range(301):
        clock.now = 1000.0 + second
        traffic.rows("train", 2_000_000 if second > 150 else 1_000_000, 92_000_000)
    traffic.error("train", "ServerChangedError")
    return traffic


@pytest.fixture
def status(traffic: Traffic) -> Iterator[Status]:
    with Status(traffic, lambda: [DataSet("train", 1_281_167)], address="grpc://127.0.0.1:7") as status:
        yield status


def ask(status: Status, path: str = "/", method: str = "GET") -> tuple[int, str, dict[str, str]]:
    where = urlsplit(status.url)
    with closing(http.client.HTTPConnection(where.hostname or "", where.port, timeout=HANG)) as connection:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), dict(answer.headers)


class TestHttp:
    def test_page(self, status: Status) -> None:
        code, text, headers = ask(status)
        assert code == 200
        assert headers["Content-Type"] == "text/html; charset=utf-8"
        for part in ("grpc://127.0.0.1:7", "train", "1,281,167", "75d608d996bb", "2 M", "92 MB", "10.0.0.7"):
            assert part in text, part
        assert "ServerChangedError" in text
        assert text.count("<svg") == 2
        assert "http://" not in text.replace("grpc://", "")
        assert "https://" not in text

    def test_only_its_own_script_may_run(self, status: Status) -> None:
        _, text, headers = ask(status)
        (nonce,) = set(re.findall(r'nonce="([^"]+)"', text))
        policy = headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'none'; ")
        assert f"script-src 'nonce-{nonce}'" in policy
        assert nonce not in ask(status)[1]

    def test_body_is_what_changes(self, status: Status, traffic: Traffic) -> None:
        before = ask(status, "/body")[1]
        assert "<html" not in before
        assert before in ask(status)[1]
        traffic.stream_started("train", "ipv4:10.0.0.8:1")
        assert "10.0.0.8" in ask(status, "/body")[1]

    def test_metrics(self, status: Status) -> None:
        code, text, headers = ask(status, "/metrics")
        assert code == 200
        assert headers["Content-Type"].startswith("text/plain")
        assert 'penstock_server_rows_total{dataset="train"} 4.51e+08' in text
        assert "process_resident_memory_bytes" in text

    def test_health(self, status: Status) -> None:
        assert ask(status, "/health")[:2] == (200, "ok\n")
        status.stop()
        assert ask(status, "/health")[:2] == (503, "stopping\n")

    def test_head_has_no_body(self, status: Status) -> None:
        code, text, headers = ask(status, "/metrics", "HEAD")
        assert (code, text) == (200, "")
        assert int(headers["Content-Length"]) > 100

    @pytest.mark.parametrize("path", ["/nothing", "/../../etc/passwd", "/body/", "/metrics%00"])
    def test_other_paths(self, status: Status, path: str) -> None:
        assert ask(status, path)[0] == 404

    @pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
    def test_other_methods(self, status: Status, method: str) -> None:
        assert ask(status, "/", method)[0] == 501

    def test_names_are_text(self, traffic: Traffic) -> None:
        bad = '<img src=x onerror="alert(1)">'
        traffic.serve([bad])
        with Status(traffic, lambda: [DataSet(bad, 1, bad)], address=bad) as status:
            text = ask(status)[1]
        assert "<img" not in text
        assert "&lt;img src=x" in text

    def test_nothing_served_and_nobody_there(self) -> None:
        with Status(Traffic(), list, address="grpc://x:1") as status:
            assert "nobody" in ask(status)[1]

    def test_slow_and_silent_clients_hold_nobody_up(self, status: Status) -> None:
        where = urlsplit(status.url)
        silent = [socket.create_connection((where.hostname, where.port or 0)) for _ in range(20)]
        try:
            assert ask(status, "/health")[0] == 200
        finally:
            for one in silent:
                one.close()

    def test_connections_are_bounded(self, status: Status) -> None:
        where = urlsplit(status.url)
        before = threading.active_count()
        many = [socket.create_connection((where.hostname, where.port or 0)) for _ in range(100)]
        try:
            time.sleep(0.3)
            assert threading.active_count() - before <= 32
        finally:
            for one in many:
                one.close()

    @full_only("300 connections for each", but=["half"])
    @pytest.mark.parametrize(
        "said", [b"", b"GET /hea", b"GET / HTTP/1.1\r\nHost: x\r\n"], ids=["nothing", "half", "headers"]
    )
    def test_whoever_asks_is_answered_beside_300_who_do_not(self, status: Status, said: bytes) -> None:
        where = urlsplit(status.url)
        many = []
        try:
            for _ in range(300):
                many.append(socket.create_connection((where.hostname, where.port or 0), timeout=10))
                with suppress(ConnectionError):  # dropped for a newer one
                    many[-1].sendall(said)
            for _ in range(40):  # more than there are connections at once
                assert ask(status, "/health")[:2] == (200, "ok\n")
            # All but the newest have been ended, which is seen by those who held them.
            for one in many[:200]:
                with suppress(ConnectionError):
                    assert one.recv(100) == b""
        finally:
            for one in many:
                one.close()

    def test_a_request_that_trickles_in_ends_in_seconds(self, status: Status, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("penstock.server.status._PATIENCE", 1.0)
        where = urlsplit(status.url)
        with socket.create_connection((where.hostname, where.port or 0), timeout=20) as slow:
            ended = threading.Event()

            def trickle() -> None:
                with suppress(OSError):
                    while not ended.wait(0.05):
                        slow.sendall(b"x")  # never silent for long, and never done

            thread = threading.Thread(target=trickle)
            thread.start()
            with suppress(ConnectionError):
                assert slow.recv(100) == b""
            ended.set()
            thread.join()

    def test_bytes_that_are_no_request(self, status: Status) -> None:
        where = urlsplit(status.url)
        for data in (
            b"\x16\x03\x01\x02\x00\x01",
            b"GET\r\n\r\n",
            b"\0" * 70_000,
            b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 500,
        ):
            with socket.create_connection((where.hostname, where.port or 0), timeout=10) as connection:
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):
                    pass
        assert ask(status, "/health")[0] == 200

    def test_a_port_that_is_taken(self, status: Status, traffic: Traffic) -> None:
        port = urlsplit(status.url).port or 0
        with pytest.raises(ConfigError, match=f"port {port}"):
            Status(traffic, list, address="grpc://x:1", port=port)

    def test_close_twice_ends_the_thread(self, traffic: Traffic) -> None:
        status = Status(traffic, list, address="grpc://x:1")
        status.close()
        status.close()
        assert "penstock-status" not in {thread.name for thread in threading.enumerate()}


class TestPlot:
    @pytest.mark.parametrize("highest", [0.3, 1, 1.1, 2, 3, 4, 5, 7, 9.99, 10, 12, 99, 100, 123_456, 6.2e6, 9.1e12])
    def test_ticks_are_few_round_and_high_enough(self, highest: float) -> None:
        marks = ticks(highest)
        assert 3 <= len(marks) <= 6
        assert marks[-1] >= highest * 0.999999
        assert f"{marks[1]:e}"[0] in "125"

    @pytest.mark.parametrize(
        ("value", "text"),
        [(0, "0"), (0.25, "0.25"), (12, "12"), (999.7, "1 k"), (12_345, "12.3 k"), (999_960, "1 M"), (4.5e9, "4.5 G")],
    )
    def test_numbers_are_short(self, value: float, text: str) -> None:
        assert short(value) == text

    @pytest.mark.parametrize("values", [[], [0.0], [5.0], [0.0] * 300, list(range(300)), [1.0] * 7])
    def test_every_plot_is_well_formed_and_within_its_frame(self, values: list[float]) -> None:
        from xml.etree import ElementTree

        root = ElementTree.fromstring(area(values, title="rows <&> s", seconds=300))
        width, height = map(float, root.attrib["viewBox"].split()[2:])
        for line in root.iter("polyline"):
            points = np.array([list(map(float, point.split(","))) for point in line.attrib["points"].split()])
            assert len(points) <= 150
            assert (points >= 0).all()
            assert (points <= (width, height)).all()


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
class TestBrowser:
    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_screenshot(self, status: Status, tmp_path: Path, scheme: str) -> None:
        dark = DARK if scheme == "dark" else ()
        browse(status.url, tmp_path, f"--screenshot={tmp_path / 'page.png'}", *dark)
        image = cv2.imread(str(tmp_path / "page.png"))
        assert image is not None
        assert image.shape == (900, 1160, 3)
        blue, green, red = (image[..., channel].astype(int) for channel in range(3))
        corner = image[5, 5].mean()
        assert corner > 230 if scheme == "light" else corner < 40
        line = (blue > 150) & (blue - red > 80) & (green > red)
        left, right = line[150:420, :580], line[150:420, 580:]
        assert left.sum() > 300
        assert right.sum() > 300
        # The rate doubles half-way: the line is higher up in the right half of the plot than in the left.
        rows, columns = np.nonzero(left)
        assert rows[columns > 400].mean() < rows[columns < 250].mean() - 30

    def test_the_page_renews_itself(self, traffic: Traffic, tmp_path: Path) -> None:
        asked: list[int] = []

        def served() -> list[DataSet]:
            asked.append(1)
            return [DataSet("train", 5000 + len(asked))]

        with Status(traffic, served, address="grpc://127.0.0.1:7") as status:
            text = browse(status.url, tmp_path, "--dump-dom")
        assert len(asked) >= 3
        (shown,) = re.findall(r"<td>(5,\d{3})</td>", text)
        assert "5,001" < shown <= f"{5000 + len(asked):,}"
        assert 'class="stale"' not in text

    def test_the_page_says_when_no_answer_comes(self, traffic: Traffic, tmp_path: Path) -> None:
        def served() -> list[DataSet]:
            if asked:
                raise RuntimeError("gone")
            asked.append(1)
            return [DataSet("train", 5000)]

        asked: list[int] = []
        with Status(traffic, served, address="grpc://127.0.0.1:7") as status:
            text = browse(status.url, tmp_path, "--dump-dom")
        assert '<body class="stale">' in text
        assert "5,000" in text
