"""`Status`: a small HTTP server beside the metadata server, for people, Prometheus and health checks.

    /           the status page, which updates itself
    /metrics    for Prometheus
    /health     200 "ok" while it serves, 503 "stopping" while it finishes its streams

It is read-only (GET and HEAD) and shows counts, names and sizes of datasets, and addresses of clients, but no rows and
no paths. It has no password, so it listens on loopback by default.

Idle connections cannot block others: a whole request must arrive within seconds, and at the limit of connections, a new
one replaces the one that has been silent longest.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from penstock.errors import ConfigError
from penstock.server.logs import Log
from penstock.server.metrics import Served, registry
from penstock.server.status_html import body, page
from penstock.server.traffic import Traffic

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

__all__ = ["Status"]

_CONNECTIONS = 32
"""Maximum number of connections; each has a thread."""

_PATIENCE = 5.0
"""Seconds for a whole request to arrive, and for an answer to be read."""

_ROOM = 1.0
"""Seconds to wait until a dropped connection has ended: its thread has to wake up."""


class Status:
    """The HTTP server, which runs in its own threads until `close`. A context manager.

    Args:
        traffic: the traffic of the metadata server.
        served: returns the current datasets.
        address: the address of the metadata server, shown on the page.
        host, port: the address to listen on; port 0 selects a free port, see `url`.
        log: receives failures.

    Raises:
        ConfigError: the port is taken or not allowed, the host is unknown, or prometheus-client is not installed.
    """

    def __init__(
        self,
        traffic: Traffic,
        served: Callable[[], Sequence[Served]],
        *,
        address: str,
        host: str = "127.0.0.1",
        port: int = 0,
        log: Log | None = None,
    ) -> None:
        self.traffic, self.served, self.address, self.log = traffic, served, address, log
        self.registry: CollectorRegistry = registry(traffic, served)
        self.stopping = False
        try:
            self._http = _Http((host, port), self)
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConfigError(f"cannot serve metrics on {host} port {port}: {reason}; choose another one") from error
        self._thread = threading.Thread(target=self._http.serve_forever, name="penstock-status", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """The URL of the page."""
        host, port = self._http.server_address[:2]
        return f"http://[{host!s}]:{port}/" if ":" in str(host) else f"http://{host!s}:{port}/"

    def stop(self) -> None:
        """Make `/health` report that the server is stopping."""
        self.stopping = True

    def close(self) -> None:
        """Stop listening. Idempotent."""
        with contextlib.suppress(
            OSError
        ):  # already closed, or a system where this wakes no thread and closing takes longer
            self._http.socket.shutdown(socket.SHUT_RDWR)
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # requests in progress end with the process
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], status: Status) -> None:
        self.status = status
        self._free = threading.BoundedSemaphore(_CONNECTIONS)
        self._lock = threading.Lock()
        self._silent: dict[
            socket.socket, float
        ] = {}  # connections without a whole request: since when, the oldest first
        self._asking: dict[socket.socket, None] = {}  # connections being answered, the oldest first
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()  # the base class would look up a host name

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self._drop_oldest()
            if not self._free.acquire(timeout=_ROOM):
                self.shutdown_request(request)
                return
        with self._lock:
            self._silent[request] = time.monotonic()
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._forget(request)
            self._free.release()

    def shutdown_request(self, request: Any) -> None:
        self._forget(request)  # before its descriptor is reused
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """End connections whose request takes too long to arrive; called twice a second."""
        late = time.monotonic() - _PATIENCE
        with self._lock:
            for request in [request for request, since in self._silent.items() if since < late]:
                self._end(request)

    def arrived(self, request: Any) -> None:
        """Note that a whole request has arrived."""
        with self._lock:
            if self._silent.pop(request, None) is not None:
                self._asking[request] = None

    def _drop_oldest(self) -> None:
        with self._lock:
            oldest = next(iter(self._silent or self._asking), None)
            if oldest is not None:
                self._end(oldest)

    def _end(self, request: socket.socket) -> None:
        """Shut down a connection, so that its thread wakes up and closes it."""
        self._silent.pop(request, None)
        self._asking.pop(request, None)
        with contextlib.suppress(OSError):  # already closed by the client
            request.shutdown(socket.SHUT_RDWR)

    def _forget(self, request: Any) -> None:
        with self._lock:
            self._silent.pop(request, None)
            self._asking.pop(request, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exception()
        if self.status.log is not None and not isinstance(error, ConnectionError | TimeoutError):
            self.status.log.often("error", "status page failed", error=f"{type(error).__name__}: {error}")


class _Handler(BaseHTTPRequestHandler):
    server: _Http
    server_version, sys_version = "penstock", ""
    timeout = _PATIENCE

    def parse_request(self) -> bool:
        whole = super().parse_request()
        self.server.arrived(self.request)
        return whole

    def do_GET(self) -> None:
        status = self.server.status
        path = self.path.partition("?")[0]
        if path == "/":
            nonce = secrets.token_urlsafe(12)
            html = page(status.address, status.traffic.snapshot(), status.served(), nonce=nonce)
            allowed = f"default-src 'none'; connect-src 'self'; style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'"
            self._answer(200, "text/html; charset=utf-8", html, policy=allowed)
        elif path == "/body":
            self._answer(200, "text/html; charset=utf-8", body(status.traffic.snapshot(), status.served()))
        elif path == "/metrics":
            from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

            self._answer(200, CONTENT_TYPE_LATEST, generate_latest(status.registry).decode())
        elif path == "/health":
            code, text = (503, "stopping\n") if status.stopping else (200, "ok\n")
            self._answer(code, "text/plain; charset=utf-8", text)
        else:
            self._answer(404, "text/plain; charset=utf-8", "there are /, /metrics and /health\n")

    do_HEAD = do_GET

    def _answer(self, code: int, kind: str, text: str, *, policy: str = "default-src 'none'") -> None:
        data = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Security-Policy", policy)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, format: str, *values: object) -> None:
        pass  # requests are not logged; failures are, by handle_error
