"""Objects over HTTP, by Python's own client in the threads that wait for blocks anyway.

fsspec's HTTP file system is not used: it takes a whole object for the range that was asked for, and a short answer for
a whole one; and the loop under it moves a third of the bytes a second, for three times the processor time.

Proxies are those of the environment (HTTP_PROXY, HTTPS_PROXY, NO_PROXY), certificates those of the system
(SSL_CERT_FILE). Options: ``headers``, and ``ca_file`` for certificates of one's own.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import re
import socket
import ssl
import threading
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit

from penstock.errors import (
    ConfigError,
    StorageAuthError,
    StorageChangedError,
    StorageError,
    StorageNotFoundError,
)
from penstock.storage.backend import Cancel, Receiver, Stat, Transient, call_in_thread
from penstock.storage.urls import shown, through_gateway

__all__ = ["HttpBackend"]

_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)$")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_UNSATISFIED = re.compile(r"bytes \*/(\d+)$")
_PIECE = 1 << 18  # bytes read at once; a timeout loses at most so many
_SPARE = 32  # idle connections kept for a host
_REDIRECTS = 10
_AGAIN = (408, 425, 429)  # and 5xx
_SAFE = "/%:@!$&'()*+,;=~-._[]"

T = TypeVar("T")
Where = tuple[str, str, int | None]


class _Connections:
    """Connections that are open and idle, by host. For one process, and all its threads."""

    def __init__(self, tls: ssl.SSLContext) -> None:
        self._tls, self._lock = tls, threading.Lock()
        self._idle: dict[Where, list[http.client.HTTPConnection]] = {}

    def take(self, where: Where, idle: float) -> tuple[http.client.HTTPConnection, bool]:
        """One for this host, and whether it was used before."""
        with self._lock:
            spare = self._idle.get(where)
            if spare:
                used = spare.pop()
                if used.sock is not None:
                    used.sock.settimeout(idle)
                    return used, True
        return self._new(where, idle), False

    def give_back(self, where: Where, connection: http.client.HTTPConnection) -> None:
        """Keep one whose answer was read to its end."""
        with self._lock:
            spare = self._idle.setdefault(where, [])
            if connection.sock is not None and len(spare) < _SPARE:
                spare.append(connection)
                return
        connection.close()

    def _new(self, where: Where, idle: float) -> http.client.HTTPConnection:
        protocol, host, port = where
        proxy = _proxy(protocol, host, port)
        if protocol == "http":
            if proxy is None:
                return http.client.HTTPConnection(host, port, timeout=idle)
            return http.client.HTTPConnection(proxy.hostname or "", proxy.port, timeout=idle)
        if proxy is None:
            return http.client.HTTPSConnection(host, port, timeout=idle, context=self._tls)
        connection = http.client.HTTPSConnection(proxy.hostname or "", proxy.port, timeout=idle, context=self._tls)
        connection.set_tunnel(host, port, headers=_basic(proxy, "Proxy-Authorization"))
        return connection


class _Exchange:
    """One request and its answer; closed at once when it is cancelled from another thread."""

    def __init__(self, connections: _Connections, where: Where, cancel: Cancel) -> None:
        self._connections, self._where, self._cancel = connections, where, cancel
        self._connection: http.client.HTTPConnection | None = None
        self.answer: http.client.HTTPResponse | None = None
        self._key = cancel.add(self._interrupt)

    def ask(self, target: str, headers: Mapping[str, str], idle: float) -> http.client.HTTPResponse:
        """The answer's header. A connection that was idle for too long is replaced without a word."""
        while True:
            self._connection, used = self._connections.take(self._where, idle)
            try:
                self._connection.request("GET", target, headers=dict(headers))
                if self._cancel.is_set():
                    raise Transient("it was cancelled")
                self.answer = self._connection.getresponse()
                return self.answer
            except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError):
                self._connection.close()
                if not used or self._cancel.is_set():
                    raise

    def close(self) -> None:
        """Let go: the connection is kept for others if the answer was read to its end."""
        self._cancel.remove(self._key)
        connection, answer = self._connection, self.answer
        if connection is None:
            return
        if answer is not None and answer.isclosed() and not answer.will_close and not self._cancel.is_set():
            self._connections.give_back(self._where, connection)
        else:
            if answer is not None:
                answer.close()
            connection.close()

    def _interrupt(self) -> None:
        sock = None if self._connection is None else self._connection.sock
        if sock is not None:
            with contextlib.suppress(OSError):  # it is closed already
                sock.shutdown(socket.SHUT_RDWR)


class HttpBackend:
    """Reads by GET alone: many servers, and all presigned addresses, refuse HEAD."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        unknown = sorted(set(options) - {"headers", "ca_file"})
        if unknown:
            raise ConfigError(f"options of HTTP are 'headers' and 'ca_file', not {', '.join(map(repr, unknown))}")
        self._headers = {str(name): str(value) for name, value in dict(options.get("headers") or {}).items()}
        self._connections = _Connections(ssl.create_default_context(cafile=options.get("ca_file")))

    def stat(self, url: str, *, idle: float, deadline: float, cancel: Cancel) -> Stat:
        def look() -> Stat:
            exchange, answer = self._open(url, "bytes=0-0", idle, cancel)
            try:
                stat = _parse(answer, url)[0]
                if stat.ranged:
                    answer.read()
                return stat
            finally:
                exchange.close()

        return call_in_thread(lambda: _translated(url, look), deadline=deadline, cancel=cancel)

    def fetch(
        self, url: str, begin: int, end: int | None, into: Receiver, *, idle: float, deadline: float, cancel: Cancel
    ) -> None:
        wanted = None if begin == 0 and end is None else f"bytes={begin}-{'' if end is None else end - 1}"

        def read() -> None:
            exchange, answer = self._open(url, wanted, idle, cancel)
            try:
                into.begun(*_parse(answer, url))
                _receive(answer, into, cancel)
                if answer.length == 0:  # its end was read, though not looked at
                    answer.read()
            finally:
                exchange.close()

        call_in_thread(lambda: _translated(url, read), deadline=deadline, cancel=cancel)

    def glob(self, url: str, *, deadline: float) -> list[str]:
        raise StorageError(f"{shown(url)}: patterns need a store that can be listed, HTTP cannot; name the files")

    def _open(
        self, url: str, wanted: str | None, idle: float, cancel: Cancel
    ) -> tuple[_Exchange, http.client.HTTPResponse]:
        """Ask, and follow where the server sends us. Credentials stay with the first host, and TLS stays TLS."""
        address = through_gateway(url)
        if _CONTROL.search(address):  # urlsplit would leave them out, and ask for something else
            raise StorageError(f"cannot read {shown(url)!r}: there are line feeds or other control characters in it")
        first = urlsplit(address)
        headers = {"Accept-Encoding": "identity", **({"Range": wanted} if wanted else {})}
        own = {**_basic(first, "Authorization"), **self._headers}
        for _ in range(_REDIRECTS):
            parts = urlsplit(address)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise StorageError(f"{shown(url)}: not an address of a web server: {shown(address)}")
            if first.scheme == "https" and parts.scheme == "http":
                raise StorageError(
                    f"{shown(url)}: the server sends us to {shown(address)}, which has no TLS; say http://"
                )
            where = (parts.scheme, parts.hostname, parts.port)
            exchange = _Exchange(self._connections, where, cancel)
            try:
                same = (parts.scheme, parts.netloc) == (first.scheme, first.netloc)
                answer = exchange.ask(_target(parts), {**headers, **(own if same else {})}, idle)
            except BaseException:
                exchange.close()
                raise
            location = answer.headers.get("Location")
            if answer.status not in (301, 302, 303, 307, 308) or not location:
                return exchange, answer
            exchange.close()
            address = urljoin(address, location)
        raise StorageError(f"cannot read {shown(url)}: more than {_REDIRECTS} redirections")


def _receive(answer: http.client.HTTPResponse, into: Receiver, cancel: Cancel) -> None:
    """Read to the end, or to what is wanted, straight into where it belongs if there is such a place."""
    scratch = None
    more = True
    while more and not cancel.is_set():
        room = into.room(_PIECE)
        if room is None:
            scratch = scratch if scratch is not None else memoryview(bytearray(_PIECE))
            count = answer.readinto(scratch)
            more = count > 0 and into.piece(scratch[:count])
        else:
            count = answer.readinto(room) if len(room) else 0
            more = count > 0 and into.filled(count)


def _proxy(protocol: str, host: str, port: int | None) -> SplitResult | None:
    """The proxy that the environment names for a host."""
    address = urllib.request.getproxies().get(protocol)
    if not address or urllib.request.proxy_bypass(host if port is None else f"{host}:{port}"):
        return None
    return urlsplit(address if "://" in address else f"http://{address}")


def _target(parts: SplitResult) -> str:
    """What the request line asks for: the whole address where a proxy is asked."""
    path = quote(parts.path or "/", safe=_SAFE) + (f"?{quote(parts.query, safe=_SAFE + '?')}" if parts.query else "")
    if parts.scheme == "http" and _proxy("http", parts.hostname or "", parts.port) is not None:
        return f"http://{parts.netloc.rpartition('@')[2]}{path}"
    return path


def _basic(parts: SplitResult, header: str) -> dict[str, str]:
    """The header that carries the user and password of an address, if it has any."""
    if parts.username is None:
        return {}
    text = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return {header: "Basic " + base64.b64encode(text.encode()).decode()}


def _translated(url: str, function: Callable[[], T]) -> T:
    """The function's result, with the client's errors as ours."""
    try:
        return function()
    except (StorageError, Transient):
        raise
    except TimeoutError:
        raise Transient("no byte came in time") from None
    except ssl.SSLCertVerificationError as error:
        raise StorageError(
            f"cannot read {shown(url)}: its certificate is not trusted: {error.verify_message}"
        ) from None
    except (http.client.InvalidURL, ValueError) as error:  # an address or a header that cannot be sent
        raise StorageError(f"cannot read {shown(url)}: {error}") from None
    except (http.client.HTTPException, OSError) as error:
        raise Transient(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__) from None


def _parse(answer: http.client.HTTPResponse, url: str) -> tuple[Stat, int]:
    """What the answer says of the object, and where its bytes begin."""
    status, headers = answer.status, answer.headers
    etag, modified = headers.get("ETag", ""), headers.get("Last-Modified", "")
    if status == 206:
        found = _RANGE.match(headers.get("Content-Range", ""))
        if found is None:
            raise StorageError(f"{shown(url)}: the server answers with a part but does not say which (Content-Range)")
        return Stat(int(found[3]), etag, modified), int(found[1])
    if status == 200:
        length = headers.get("Content-Length")
        if length is None or not length.isdigit():
            raise StorageError(
                f"{shown(url)}: the server does not say how large the object is (Content-Length), so that nobody could "
                "tell whether all of it arrived; download it by other means"
            )
        return Stat(int(length), etag, modified, ranged=int(length) == 0), 0
    if status == 416:
        nothing = _UNSATISFIED.match(headers.get("Content-Range", ""))
        if nothing is not None and int(nothing[1]) == 0:
            return Stat(0, etag, modified), 0
        raise StorageChangedError(f"{shown(url)} is shorter than it was: the server has no such range (HTTP 416)")
    reason = f"HTTP {status} {answer.reason or ''}".rstrip()
    if status in (404, 410):
        raise StorageNotFoundError(f"{shown(url)} does not exist ({reason})")
    if status in (401, 403, 407):
        raise StorageAuthError(f"{shown(url)}: access refused ({reason}); check the credentials, or the signature")
    if status in _AGAIN or status >= 500:
        raise Transient(reason, _seconds(headers.get("Retry-After", "")))
    raise StorageError(f"cannot read {shown(url)}: {reason}")


def _seconds(text: str) -> float:
    return min(60.0, float(text)) if text.isascii() and text.isdigit() else 0.0
