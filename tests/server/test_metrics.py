"""What a server counts, what Prometheus gets of it, and its log."""

from __future__ import annotations

import io
import json
import logging
import threading
from dataclasses import dataclass
from typing import Any

import pytest

from penstock.errors import ConfigError
from penstock.server.logs import Log, LogHandler
from penstock.server.metrics import registry
from penstock.server.traffic import History, Traffic, host_of

pytest.importorskip("prometheus_client")

ONE, TWO = "ipv4:10.0.0.1:4000", "ipv6:%5B::1%5D:99"


@dataclass
class DataSet:
    name: str
    rows: int
    fingerprint: str


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def lines(file: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.getvalue().splitlines()]


class TestTraffic:
    def test_counts_by_data_set(self) -> None:
        traffic = Traffic(clock=Clock())
        traffic.serve(["a", "b"])
        traffic.stream_started("a", ONE)
        traffic.rows("a", 10, 400)
        traffic.rows("a", 5, 200)
        traffic.stream_started("a", TWO)
        traffic.stream_ended("a", ONE, None)
        now = traffic.snapshot()
        a, b = now.datasets["a"], now.datasets["b"]
        assert (a.rows, a.bytes, a.streams, a.active, a.errors) == (15, 600, 2, 1, {})
        assert (b.rows, b.streams) == (0, 0)
        assert (now.active, len(now.clients), now.error_count) == (1, 2, 0)

    def test_errors_by_kind_and_only_of_names_that_are_served(self) -> None:
        traffic = Traffic()
        traffic.serve(["a"])
        for name in ("a", "a", None, "../../etc/passwd", "<script>"):
            traffic.error(name, "TicketError")
        now = traffic.snapshot()
        assert set(now.datasets) == {"a"}
        assert now.datasets["a"].errors == {"TicketError": 2}
        assert now.errors == {"TicketError": 3}
        assert now.error_count == 5

    def test_kinds_of_errors_are_bounded(self) -> None:
        traffic = Traffic()
        for number in range(1000):
            traffic.error(None, f"kind {number}")
        errors = traffic.snapshot().errors
        assert len(errors) <= 65
        assert sum(errors.values()) == 1000

    def test_clients_are_machines_and_forgotten_after_a_minute(self) -> None:
        clock = Clock()
        traffic = Traffic(clock=clock)
        for port in (1, 2, 3):
            traffic.stream_started("a", f"ipv4:10.0.0.1:{port}")
        traffic.stream_started("a", "ipv4:10.0.0.2:1")
        for port in (1, 2):
            traffic.stream_ended("a", f"ipv4:10.0.0.1:{port}", None)
        clients = traffic.snapshot().clients
        assert [(c.host, c.active, c.streams) for c in clients] == [("10.0.0.1", 1, 3), ("10.0.0.2", 1, 1)]
        traffic.stream_ended("a", "ipv4:10.0.0.2:1", None)
        clock.now += 59
        assert len(traffic.snapshot().clients) == 2
        clock.now += 2
        assert [c.host for c in traffic.snapshot().clients] == ["10.0.0.1"]

    def test_clients_that_come_and_go_take_no_memory(self) -> None:
        traffic = Traffic(clock=Clock())
        traffic.stream_started("a", "ipv4:10.99.9.9:1")  # stays
        for number in range(10_000):
            peer = f"ipv4:10.{number // 250}.{number % 250}.1:1"
            traffic.stream_started("a", peer)
            traffic.stream_ended("a", peer, None)
        now = traffic.snapshot()
        assert len(now.clients) <= 4097
        assert "10.99.9.9" in {client.host for client in now.clients}
        assert now.datasets["a"].streams == 10_001

    def test_rates_are_those_of_complete_seconds(self) -> None:
        clock = Clock()
        traffic = Traffic(clock=clock)
        for second in range(20):
            clock.now = 1000.5 + second
            traffic.rows("a", 100 if second < 19 else 10**9, 1000)
        counts = traffic.snapshot().datasets["a"]
        assert len(counts.history) == History.SECONDS
        assert counts.rate(10) == (100, 1000)
        assert counts.history[-19:] == [(100, 1000)] * 19
        assert counts.history[-20] == (0, 0)

    def test_history_goes_round_and_gaps_are_zero(self) -> None:
        history = History()
        for second in range(0, 2000, 2):
            history.add(second, 1, 1)
        assert history.last(2000, 4) == [(1, 1), (0, 0), (1, 1), (0, 0)]
        assert sum(rows for rows, _ in history.last(2000 + 298, 300)) == 1
        assert sum(rows for rows, _ in history.last(2000 + 299, 300)) == 0
        assert sum(rows for rows, _ in history.last(10**6, 300)) == 0

    def test_threads(self) -> None:
        traffic = Traffic()

        def work() -> None:
            for _ in range(2000):
                traffic.stream_started("a", ONE)
                traffic.rows("a", 3, 30)
                traffic.stream_ended("a", ONE, None)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        counts = traffic.snapshot().datasets["a"]
        assert (counts.rows, counts.bytes, counts.streams, counts.active) == (24_000, 240_000, 8000, 0)

    @pytest.mark.parametrize(
        ("peer", "host"), [(ONE, "10.0.0.1"), (TWO, "::1"), ("unix:/run/x", "unix:/run/x"), ("", "")]
    )
    def test_hosts(self, peer: str, host: str) -> None:
        assert host_of(peer) == host


class TestPrometheus:
    def test_values_are_read_when_scraped(self) -> None:
        traffic = Traffic()
        served = [DataSet("train", 500, "75d6")]
        metrics = registry(traffic, lambda: served)
        traffic.serve(["train"])

        def value(name: str, **labels: str) -> float | None:
            found: float | None = metrics.get_sample_value(f"penstock_server_{name}", labels)
            return found

        assert value("rows_total", dataset="train") == 0
        traffic.stream_started("train", ONE)
        traffic.rows("train", 7, 70)
        traffic.error("train", "TicketError")
        traffic.error(None, "ServerAuthError")
        assert value("rows_total", dataset="train") == 7
        assert value("bytes_total", dataset="train") == 70
        assert value("streams_total", dataset="train") == 1
        assert value("active_streams", dataset="train") == 1
        assert value("errors_total", dataset="train", kind="TicketError") == 1
        assert value("errors_total", dataset="", kind="ServerAuthError") == 1
        assert value("dataset_rows", dataset="train", fingerprint="75d6") == 500
        assert value("clients") == 1
        served.append(DataSet("more", 1, "aa"))
        assert value("dataset_rows", dataset="more", fingerprint="aa") == 1

    def test_the_text_is_valid(self) -> None:
        import prometheus_client
        from prometheus_client.parser import text_string_to_metric_families

        traffic = Traffic()
        traffic.serve(['a"\n\\'])
        text = prometheus_client.generate_latest(registry(traffic, list)).decode()
        families = {family.name: family for family in text_string_to_metric_families(text)}
        assert families["penstock_server_rows"].samples[0].labels == {"dataset": 'a"\n\\'}
        assert "process_resident_memory_bytes" in families
        assert all(family.documentation for family in families.values())


class TestLog:
    def test_lines_are_json(self) -> None:
        file = io.StringIO()
        Log(file).write("info", "reloaded", changed={"a": "x"}, error=None)
        (line,) = lines(file)
        assert line.pop("time").endswith("Z")
        assert line == {"level": "info", "event": "reloaded", "changed": {"a": "x"}}

    def test_what_clients_send_stays_in_its_line(self) -> None:
        file = io.StringIO()
        Log(file).write("error", "error", kind='x"}\n{"level": "info"\x1b[31m\u2028é' + "y" * 5000)
        assert file.getvalue().count("\n") == 1
        assert file.getvalue().isascii()
        assert len(file.getvalue()) < 4200
        assert lines(file)[0]["kind"].startswith('x"}\n{"level"')

    def test_levels(self) -> None:
        file = io.StringIO()
        log = Log(file, "warning")
        for level in ("debug", "info", "warning", "error"):
            log.write(level, "event")
        assert [line["level"] for line in lines(file)] == ["warning", "error"]
        with pytest.raises(ConfigError, match="verbose"):
            Log(file, "verbose")

    def test_floods_are_counted(self) -> None:
        file, clock = io.StringIO(), Clock()
        log = Log(file, clock=clock)
        for _ in range(5000):
            log.often("warning", "error", kind="ServerAuthError")
        log.write("info", "reloaded")  # of ours: never left out
        assert len(lines(file)) == 101
        clock.now += 1
        log.often("warning", "error", kind="TicketError")
        assert [line["event"] for line in lines(file)[-2:]] == ["lines left out", "error"]
        assert lines(file)[-2]["lines"] == 4900
        for _ in range(150):
            log.often("warning", "error")
        log.close()
        assert lines(file)[-1]["lines"] == 51

    def test_tracebacks_of_the_library_are_lines_too(self) -> None:
        file = io.StringIO()
        logger = logging.getLogger("penstock.server.test")
        handler = LogHandler(Log(file))
        logger.addHandler(handler)
        try:
            raise RuntimeError("unexpected")
        except RuntimeError:
            logger.exception("a call failed")
        finally:
            logger.removeHandler(handler)
        (line,) = lines(file)
        assert (line["level"], line["logger"]) == ("error", "penstock.server.test")
        assert line["text"].startswith("a call failed\nTraceback")
        assert "RuntimeError: unexpected" in line["text"]

    def test_a_file_that_cannot_be_written_stops_nothing(self) -> None:
        file = io.StringIO()
        log = Log(file)
        file.close()
        log.write("info", "event")
        assert log.lost == 1

    def test_traffic_tells_errors_and_at_debug_streams(self) -> None:
        for level, events in (
            ("info", ["stream ended", "error"]),
            ("debug", ["stream started", "stream ended", "stream started", "stream ended", "error"]),
        ):
            file = io.StringIO()
            traffic = Traffic(Log(file, level))
            traffic.stream_started("a", ONE)
            traffic.stream_ended("a", ONE, None)
            traffic.stream_started("a", ONE)
            traffic.stream_ended("a", ONE, "cancelled")
            traffic.error(None, "ServerAuthError")
            found = lines(file)
            assert [line["event"] for line in found] == events
            assert found[-2]["error"] == "cancelled"
            assert found[-1]["kind"] == "ServerAuthError"
