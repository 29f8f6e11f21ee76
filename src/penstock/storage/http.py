"""Objects over HTTP, in the session of fsspec's HTTP file system.

Its own reading is not used: it takes a whole object for the range that was asked for, and a short answer for a whole
one. Proxies, certificates, ``headers=`` and ``client_kwargs=`` are as fsspec and aiohttp have them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import aiohttp
from fsspec.implementations.http import HTTPFileSystem

from penstock.errors import StorageAuthError, StorageChangedError, StorageError, StorageNotFoundError
from penstock.storage.backend import Cancel, Receiver, Stat, Transient, run_async
from penstock.storage.urls import shown, through_gateway

__all__ = ["HttpBackend"]

_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)$")
_UNSATISFIED = re.compile(r"bytes \*/(\d+)$")
_BUFFER = 1 << 19  # bytes that aiohttp takes from a connection before it stops reading
_AGAIN = (408, 425, 429)  # and 5xx
_PERMANENT = (aiohttp.InvalidURL, aiohttp.ClientConnectorCertificateError, aiohttp.TooManyRedirects)


class HttpBackend:
    """Reads by GET alone: many servers, and all presigned addresses, refuse HEAD."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        client = {"trust_env": True, **options.get("client_kwargs", {}), "auto_decompress": False}
        self._fs = HTTPFileSystem(skip_instance_cache=True, **{**options, "client_kwargs": client})

    def stat(self, url: str, *, idle: float, deadline: float, cancel: Cancel) -> Stat:
        return run_async(self._stat(url, idle), deadline=deadline, cancel=cancel)

    def fetch(
        self, url: str, begin: int, end: int | None, into: Receiver, *, idle: float, deadline: float, cancel: Cancel
    ) -> None:
        run_async(self._fetch(url, begin, end, into, idle), deadline=deadline, cancel=cancel)

    def glob(self, url: str, *, deadline: float) -> list[str]:
        raise StorageError(f"{shown(url)}: patterns need a store that can be listed, HTTP cannot; name the files")

    async def _stat(self, url: str, idle: float) -> Stat:
        try:
            response = await self._get(url, "bytes=0-0", idle)
            try:
                return _parse(response, url)[0]
            finally:
                response.close()
        except _PERMANENT as error:
            raise StorageError(f"cannot read {shown(url)}: {_reason(error)}") from None
        except StorageError:  # which is an OSError
            raise
        except (aiohttp.ClientError, OSError) as error:
            raise _transient(error) from None

    async def _fetch(self, url: str, begin: int, end: int | None, into: Receiver, idle: float) -> None:
        wanted = None if begin == 0 and end is None else f"bytes={begin}-{'' if end is None else end - 1}"
        try:
            response = await self._get(url, wanted, idle)
            try:
                stat, offset = _parse(response, url)
                into.begun(stat, offset)
                while data := await response.content.readany():
                    if not into.piece(data):
                        break
                if response.content.at_eof():
                    response.release()  # to be used again
            finally:
                if not response.closed and not response.content.at_eof():
                    response.close()
        except _PERMANENT as error:
            raise StorageError(f"cannot read {shown(url)}: {_reason(error)}") from None
        except StorageError:
            raise
        except (aiohttp.ClientError, OSError) as error:
            raise _transient(error) from None

    async def _get(self, url: str, wanted: str | None, idle: float) -> aiohttp.ClientResponse:
        session = await self._fs.set_session()
        options = {**self._fs.kwargs}
        headers = {**(options.pop("headers", None) or {}), "Accept-Encoding": "identity"}
        if wanted is not None:
            headers["Range"] = wanted
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=idle, sock_read=idle)
        target = self._fs.encode_url(through_gateway(url))
        response: aiohttp.ClientResponse = await session.get(
            target, **{**options, "headers": headers, "timeout": timeout, "read_bufsize": _BUFFER}
        )
        return response


def _parse(response: aiohttp.ClientResponse, url: str) -> tuple[Stat, int]:
    """What the answer says of the object, and where its bytes begin."""
    status, headers = response.status, response.headers
    etag, modified = headers.get("ETag", ""), headers.get("Last-Modified", "")
    if status == 206:
        found = _RANGE.match(headers.get("Content-Range", ""))
        if found is None:
            raise StorageError(f"{shown(url)}: the server answers with a part but does not say which (Content-Range)")
        return Stat(int(found[3]), etag, modified), int(found[1])
    if status == 200:
        length = headers.get("Content-Length")
        if length is None:
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
    reason = f"HTTP {status} {response.reason or ''}".rstrip()
    if status in (404, 410):
        raise StorageNotFoundError(f"{shown(url)} does not exist ({reason})")
    if status in (401, 403, 407):
        raise StorageAuthError(f"{shown(url)}: access refused ({reason}); check the credentials, or the signature")
    if status in _AGAIN or status >= 500:
        raise Transient(reason, _seconds(headers.get("Retry-After", "")))
    raise StorageError(f"cannot read {shown(url)}: {reason}")


def _seconds(text: str) -> float:
    return min(60.0, float(text)) if text.isascii() and text.isdigit() else 0.0


def _transient(error: BaseException) -> Transient:
    if isinstance(error, TimeoutError):
        return Transient("no byte came in time")
    return Transient(_reason(error))


def _reason(error: BaseException) -> str:
    if isinstance(error, aiohttp.ClientPayloadError):
        return "the connection was cut in the middle of the answer"
    return str(error) or type(error).__name__
