"""A server's metrics for Prometheus, and a small page, over HTTP. Needs the extra: ``penstock[metrics]``.

    metrics = Metrics()
    with Server({"train": "train.txt"}, observer=metrics) as server, status_server(server, metrics) as url: ...

    /           a page with the datasets, and what was sent; the browser reloads it every ten seconds
    /health     200 "ok" while it serves, 503 "stopping" while it finishes its streams
    /metrics    for Prometheus, with memory, CPU time and open files of the process:

    penstock_server_rows_total{dataset="train"} 1.2e+08        rate() of it is rows/s
    penstock_server_bytes_total{dataset="train"} 5.4e+09
    penstock_server_streams_total{dataset="train"} 96
    penstock_server_active_streams{dataset="train"} 8
    penstock_server_errors_total{dataset="train",kind="TicketError"} 1
    penstock_server_dataset_rows{dataset="train",fingerprint="75d6..."} 1e+07

Requests without the name of a dataset count under ``dataset=""``. The HTTP server is read-only and shows names, sizes
and counts, but no rows and no paths. It has no password, so it listens on loopback by default.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import socketserver
import threading
from collections.abc import Iterator, Sequence
from html import escape
from http.server import BaseHTTPRequestHandler
from typing import Any

from penstock.errors import ConfigError
from penstock.html_page import html_page
from penstock.server.catalog import Served
from penstock.server.copies import CACHE
from penstock.server.service import Observer, Server

__all__ = ["Metrics", "status_server"]

_log = logging.getLogger(__name__)
_RELOAD = '<meta http-equiv="refresh" content="10">\n'
_COLUMNS = ("dataset", "rows", "fingerprint", "rows sent", "bytes sent", "streams begun", "streams open")
_COUNTED = ("rows_total", "bytes_total", "streams_total", "active_streams")


class Metrics(Observer):
    """The observer of a server. Thread-safe; an event costs a few microseconds.

    ``registry`` is a ``prometheus_client.CollectorRegistry`` of its own, with the metrics of the process.

    Raises:
        ConfigError: prometheus-client is not installed.
    """

    def __init__(self) -> None:
        try:
            from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector
        except ImportError as error:
            raise ConfigError("metrics need prometheus-client: pip install 'penstock[metrics]'") from error
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        prefix, of = "penstock_server", ["dataset"]
        self._rows = Counter(f"{prefix}_rows", "Rows sent.", of, registry=registry)
        self._bytes = Counter(f"{prefix}_bytes", "Bytes sent.", of, registry=registry)
        self._streams = Counter(f"{prefix}_streams", "Streams begun.", of, registry=registry)
        self._active = Gauge(f"{prefix}_active_streams", "Streams open.", of, registry=registry)
        self._errors = Counter(f"{prefix}_errors", "Requests refused.", [*of, "kind"], registry=registry)
        self._served = Gauge(f"{prefix}_dataset_rows", "Rows served.", [*of, "fingerprint"], registry=registry)

    def serving(self, datasets: Sequence[Served]) -> None:
        """Set the datasets that are served now. Those that were never read count from 0."""
        self._served.clear()
        for one in datasets:
            self._served.labels(one.name, one.fingerprint).set(one.rows)
            for metric in (self._rows, self._bytes, self._streams, self._active):
                metric.labels(one.name)

    def stream_started(self, name: str, peer: str) -> None:
        self._streams.labels(name).inc()
        self._active.labels(name).inc()

    def rows(self, name: str, count: int, nbytes: int) -> None:
        self._rows.labels(name).inc(count)
        self._bytes.labels(name).inc(nbytes)

    def stream_ended(self, name: str, peer: str, error: str | None) -> None:
        self._active.labels(name).dec()

    def error(self, name: str | None, kind: str) -> None:
        self._errors.labels(name or "", kind).inc()

    def value(self, metric: str, dataset: str) -> float:
        """Return the current value of a metric of a dataset, such as ``"rows_total"``; 0 if nothing was counted."""
        return self.registry.get_sample_value(f"penstock_server_{metric}", {"dataset": dataset}) or 0.0


@contextlib.contextmanager
def status_server(server: Server, metrics: Metrics, *, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """Serve the status of a metadata server within a ``with`` block, which gets the URL of the page.

    Args:
        server: the metadata server.
        metrics: its observer.
        host, port: the address to listen on; port 0 selects a free port.

    Raises:
        ConfigError: the port is taken or not allowed, or the host is unknown.
    """
    try:
        http = _Http((host, port), server, metrics)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"cannot serve metrics on {host} port {port}: {reason}; choose another one") from error
    thread = threading.Thread(target=http.serve_forever, name="penstock-status", daemon=True)
    thread.start()
    try:
        shown, at = http.server_address[:2]
        yield f"http://[{shown!s}]:{at}/" if ":" in str(shown) else f"http://{shown!s}:{at}/"
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


def page(server: Server, metrics: Metrics) -> str:
    """Return the status page as HTML."""
    rows = [(one.name, f"{one.rows:,}", one.fingerprint[:12]) for one in server.datasets]
    if metrics.value("streams_total", CACHE):
        rows.append((CACHE, "", ""))
    table = "".join(f"<th>{name}</th>" for name in _COLUMNS)
    for row in rows:
        counts = (f"{metrics.value(metric, row[0]):,.0f}" for metric in _COUNTED)
        table += "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in (*row, *counts)) + "</tr>"
    state = "stopping" if server.stopping else "serving"
    body = (
        f"<header><h1>Penstock server</h1><code>{escape(server.address)}</code><span class='soft'>{state}</span>"
        f"</header>\n<main><section class='wide'><table>{table}</table></section></main>\n"
        "<p class='soft'>Errors, rates and the process: <a href='metrics'>/metrics</a> of Prometheus.</p>"
    )
    return html_page(f"Penstock server {server.address}", "a { color: var(--blue) }", body, head=_RELOAD)


class _Http(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False  # requests in progress end with the process
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], server: Server, metrics: Metrics) -> None:
        self.served, self.metrics = server, metrics
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("a request for the status failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Http
    server_version, sys_version = "penstock", ""
    timeout = 5.0  # seconds for which a connection may be silent

    def do_GET(self) -> None:
        served, metrics = self.server.served, self.server.metrics
        match self.path.partition("?")[0]:
            case "/":
                self._answer(200, "text/html; charset=utf-8", page(served, metrics).encode())
            case "/metrics":
                from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

                metrics.serving(served.datasets)
                self._answer(200, CONTENT_TYPE_LATEST, generate_latest(metrics.registry))
            case "/health":
                code, text = (503, b"stopping\n") if served.stopping else (200, b"ok\n")
                self._answer(code, "text/plain; charset=utf-8", text)
            case _:
                self._answer(404, "text/plain; charset=utf-8", b"there are /, /metrics and /health\n")

    do_HEAD = do_GET

    def _answer(self, code: int, kind: str, data: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *values: object) -> None:
        pass  # requests are not logged
