"""An HTTP server that serves objects, and fails in every way that the tests ask for."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Fault = str | None
"""``500``, ``503`` with Retry-After, ``cut:N`` after N bytes, ``hang`` after the header, ``silent`` before it,
``lie:N`` (N bytes less than announced, as a complete answer), ``drip:SECONDS`` between pieces of 64 KiB."""


@dataclass
class Stored:
    """One object."""

    data: bytes
    etag: str | None = None
    modified: str | None = None
    ranges: bool = True
    encoding: str | None = None
    length: bool = True
    partial_status: int = 206

    def __post_init__(self) -> None:
        if self.etag is None:
            self.etag = f'"{hashlib.md5(self.data).hexdigest()}"'


class Server(ThreadingHTTPServer):
    """``put`` objects, set ``fault``, read ``requests``."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, Stored] = {}
        self.requests: list[tuple[str, str | None]] = []
        self.fault: Callable[[str, int, int, int], Fault] = lambda path, begin, end, number: None
        self.release = threading.Event()
        self.redirect: dict[str, str] = {}
        self.authorizations: list[tuple[str, str | None]] = []
        self.connections: set[Any] = set()
        self.lock = threading.Lock()
        self.under_way = self.most_under_way = 0

    def put(self, name: str, data: bytes, **options: Any) -> str:
        """Store an object; its address."""
        self.objects[f"/{name}"] = Stored(data, **options)
        return f"http://127.0.0.1:{self.server_address[1]}/{name}"

    def faults(self, *wanted: Fault) -> None:
        """The first requests for data go wrong in these ways, those after them do not."""
        left = list(wanted)
        self.fault = lambda path, begin, end, number: left.pop(0) if left else None

    def data_requests(self) -> list[tuple[str, str | None]]:
        """Those that were not the look at size and etag."""
        return [request for request in self.requests if request[1] != "bytes=0-0"]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that go away are what the tests are about."""


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        path, wanted = self.path.partition("?")[0], self.headers.get("Range")
        with self.server.lock:
            self.server.requests.append((path, wanted))
            number = len(self.server.requests)
            self.server.authorizations.append((path, self.headers.get("Authorization")))
            self.server.connections.add(self.client_address)
        if path in self.server.redirect:
            return self.answer(302, {"Location": self.server.redirect[path]})
        stored = self.server.objects.get(path)
        if stored is None:
            return self.answer(404)
        size = len(stored.data)
        begin, end = 0, size
        partial = wanted is not None and stored.ranges
        if partial:
            assert wanted is not None
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            begin, end = int(first), min(size, int(last) + 1) if last else size
            if begin >= size:
                return self.answer(416, {"Content-Range": f"bytes */{size}"})
        fault = None
        if wanted != "bytes=0-0":
            with self.server.lock:
                fault = self.server.fault(path, begin, end, number)
        kind, _, amount = (fault or "").partition(":")
        if kind.isdigit():
            return self.answer(int(kind), {"Retry-After": "0"} if kind == "503" else {})
        if kind == "silent":
            self.server.release.wait(30)
            self.close_connection = True
            return None
        with self.server.lock:
            self.server.under_way += 1
            self.server.most_under_way = max(self.server.most_under_way, self.server.under_way)
        try:
            self.send(stored, begin, end, partial, kind, float(amount or 0))
        finally:
            with self.server.lock:
                self.server.under_way -= 1
        return None

    def send(self, stored: Stored, begin: int, end: int, partial: bool, kind: str, amount: float) -> None:
        length = end - begin - (int(amount) if kind == "lie" else 0)
        self.send_response(stored.partial_status if partial else 200)
        if stored.length:
            self.send_header("Content-Length", str(length))
        else:
            self.close_connection = True
        if partial:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(stored.data)}")
        for name, value in (
            ("ETag", stored.etag),
            ("Last-Modified", stored.modified),
            ("Content-Encoding", stored.encoding),
        ):
            if value:
                self.send_header(name, value)
        self.end_headers()
        data = memoryview(stored.data)[begin : begin + length]
        if kind == "cut":
            self.wfile.write(data[: int(amount)])
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(2)
        elif kind == "hang":
            self.server.release.wait(30)
            self.close_connection = True
        elif kind == "drip":
            for start in range(0, len(data), 1 << 16):
                self.wfile.write(data[start : start + (1 << 16)])
                if self.server.release.wait(amount):
                    break
        else:
            self.wfile.write(data)

    def answer(self, status: int, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": "0", **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
