"""An object store on 127.0.0.1, in a process of its own, for tests and benchmarks.

A folder is served as plain HTTP and as S3 with the bucket in the path: ``URL/BUCKET/KEY`` is the file
``FOLDER/BUCKET/KEY``. Signatures are not checked. Answers wait for a latency, connections have a rate, requests fail by
a seed, and everything is counted.

    with Store(folder, latency=0.05) as store:
        store.reset()
        urllib.request.urlopen(f"{store.url}/bucket/key").read()
        assert store.counts()["requests"] == {"GET": 1}
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import email.utils
import json
import os
import random
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any
from xml.sax.saxutils import escape

_CONTROL = "/-/"
_SMALL, _PIECE = 1 << 16, 1 << 18
_REASONS = {
    200: "OK",
    204: "No Content",
    206: "Partial Content",
    403: "Forbidden",
    404: "Not Found",
    412: "Precondition Failed",
} | {
    416: "Range Not Satisfiable",
    501: "Not Implemented",
    503: "Service Unavailable",
}


@dataclass
class Behaviour:
    """How the store answers. Shares are of the GETs of objects, drawn by seed and number of the GET."""

    latency: float = 0.0
    """Seconds before each answer."""
    rate: float = 0.0
    """Bytes a second on one connection; 0 is without limit."""
    seed: int = 0
    etags: bool = True
    """Whether answers have an ETag, or only the second of the modification."""
    unavailable: float = 0.0
    """The share that is answered with 503."""
    cut: float = 0.0
    """The share whose connection is closed in the middle of the body."""
    slow: float = 0.0
    """The share that takes `slow_seconds` longer."""
    slow_seconds: float = 2.0
    outage: float = 0.0
    """Seconds, from now, in which every request is answered with 503."""
    outage_after: int = 0
    """The outage begins with this GET, counted from the last reset, instead of now."""
    refuse: int = 0
    """The status that a PUT is refused with; 0 takes it."""
    replace: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Object -> (number of its GET, file): from this GET on, the object has the file's content."""


class Store:
    """The server's process, seen from outside. It ends with `close`, or with the process that made it."""

    def __init__(self, folder: str | os.PathLike[str], **behaviour: Any) -> None:
        command = [sys.executable, __file__, os.fspath(folder), json.dumps(asdict(Behaviour(**behaviour)))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        port = self._process.stdout.readline().strip()
        if not port:
            raise RuntimeError(f"the store of {folder} did not start: exit code {self._process.wait()}")
        self.url, self.pid = f"http://127.0.0.1:{port}", self._process.pid

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()

    def behave(self, **behaviour: Any) -> None:
        """Answer in this way from now on; what is not named is as in `Behaviour`."""
        self._ask("behave", json.dumps(asdict(Behaviour(**behaviour))).encode())

    def reset(self) -> None:
        """Count from zero."""
        self._ask("reset", b"")

    def counts(self) -> dict[str, Any]:
        """Return requests by method, bytes sent of bodies, GETs and bytes by object, and faults by kind."""
        found: dict[str, Any] = json.loads(self._ask("counts", None))
        return found

    def _ask(self, what: str, data: bytes | None) -> bytes:
        with urllib.request.urlopen(self.url + _CONTROL + what, data=data, timeout=30) as answer:
            body: bytes = answer.read()
        return body


@dataclass
class Request:
    """A request with its body."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes


class _Server:
    def __init__(self, folder: Path, behaviour: Behaviour) -> None:
        self.folder = folder.resolve()
        self.gets = 0
        self.outage = (0.0, 0.0)
        self.reset()
        self.behave(behaviour)

    def reset(self) -> None:
        self.requests: Counter[str] = Counter()
        self.objects: dict[str, list[int]] = {}
        self.faults: Counter[str] = Counter()
        self.sent = self.gets = 0

    def behave(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        now = time.monotonic()
        self.outage = (0.0, 0.0) if behaviour.outage_after else (now, now + behaviour.outage)

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while await self.answer(await read_request(reader, writer), writer):
                await writer.drain()
        writer.close()

    async def answer(self, request: Request, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; whether the connection stays."""
        if request.path.startswith(_CONTROL):
            send(writer, 200, self.control(request))
            return True
        self.requests[request.method] += 1
        path = (self.folder / request.path.lstrip("/")).resolve()
        is_object = path != self.folder and path.parent != self.folder and path.is_relative_to(self.folder)
        kind = self.fault(request) if request.method == "GET" and is_object else self.gone()
        wait = self.behaviour.latency + (self.behaviour.slow_seconds if kind == "slow" else 0)
        if wait:
            await asyncio.sleep(wait)
        if kind == "unavailable":
            send(writer, 503, b"", {"Retry-After": "0"})
        elif request.method in ("GET", "HEAD") and is_object and not {"uploads", "uploadId"} & set(request.query):
            return await self.object(request, path, writer, cut=kind == "cut")
        elif request.method == "GET" and not is_object:
            send(writer, 200, self.listing(request), {"Content-Type": "application/xml"})
        elif request.method == "HEAD":
            send(writer, 200 if path.is_dir() else 404, b"")
        else:
            self.change(request, path, writer, is_object)
        return True

    def control(self, request: Request) -> bytes:
        what = request.path.removeprefix(_CONTROL)
        if what == "behave":
            self.behave(Behaviour(**json.loads(request.body)))
        elif what == "reset":
            self.reset()
        objects = {key: {"GET": gets, "bytes": size} for key, (gets, size) in self.objects.items()}
        counts = {"requests": self.requests, "bytes": self.sent, "objects": objects, "faults": self.faults}
        return json.dumps(counts).encode()

    def gone(self) -> str:
        begin, end = self.outage
        if begin <= time.monotonic() < end:
            self.faults["outage"] += 1
            return "unavailable"
        return ""

    def fault(self, request: Request) -> str:
        """Return what goes wrong with this GET of an object, by its number."""
        how, self.gets = self.behaviour, self.gets + 1
        if self.gets == how.outage_after:
            self.outage = (time.monotonic(), time.monotonic() + how.outage)
        if gone := self.gone():
            return gone
        drawn = random.Random(f"{how.seed} {self.gets}").random()
        for kind in ("unavailable", "cut", "slow"):
            share = getattr(how, kind)
            if drawn < share:
                self.faults[kind] += 1
                return kind
            drawn -= share
        return ""

    async def object(self, request: Request, path: Path, writer: asyncio.StreamWriter, cut: bool) -> bool:
        """Send an object, or its head; whether the connection stays."""
        key = request.path.lstrip("/")
        if request.method == "GET":
            count = self.objects.setdefault(key, [0, 0])
            count[0] += 1
            if key in self.behaviour.replace and count[0] == self.behaviour.replace[key][0]:
                os.replace(self.behaviour.replace[key][1], path)
        try:
            file = path.open("rb")
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            send(writer, 404, b"" if request.method == "HEAD" else error("NoSuchKey", key))
            return True
        with file:
            stat = os.fstat(file.fileno())
            tag, size = f'"{stat.st_mtime_ns:x}-{stat.st_ino:x}-{stat.st_size:x}"', stat.st_size
            if request.headers.get("if-match", tag) not in (tag, "*"):
                send(writer, 412, b"")
                return True
            headers = {"ETag": tag} if self.behaviour.etags else {}
            headers |= {"Last-Modified": email.utils.formatdate(stat.st_mtime, usegmt=True)}
            headers |= {"Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
            wanted = request.headers.get("range")
            begin, end = span(wanted, size) if wanted else (0, size)
            if wanted and begin >= end:
                send(writer, 416, b"", {"Content-Range": f"bytes */{size}"})
                return True
            if wanted:
                headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
            start(writer, 206 if wanted else 200, end - begin, headers)
            if request.method == "HEAD":
                return True
            stop = begin + (end - begin) // 2 if cut else end
            try:
                await self.body(file, begin, stop, writer)
            finally:
                self.sent += stop - begin
                count[1] += stop - begin
        return not cut

    async def body(self, file: Any, begin: int, end: int, writer: asyncio.StreamWriter) -> None:
        if end - begin <= _SMALL and not self.behaviour.rate:
            writer.write(os.pread(file.fileno(), end - begin, begin))
            return
        loop, rate, started, first = asyncio.get_running_loop(), self.behaviour.rate, time.monotonic(), begin
        while begin < end:
            count = min(_PIECE, end - begin) if rate else end - begin
            await loop.sendfile(writer.transport, file, begin, count)
            begin += count
            if rate:
                await asyncio.sleep(max(0.0, started + (begin - first) / rate - time.monotonic()))

    def listing(self, request: Request) -> bytes:
        """Return ListObjectsV2's answer, or where the bucket is."""
        bucket, query = request.path.strip("/"), request.query
        if "location" in query:
            return b'<LocationConstraint xmlns="http://s3.amazonaws.com/doc/2006-03-01/"/>'
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token") or query.get("start-after", "")
        limit = int(query.get("max-keys", 1000))
        entries: dict[str, os.stat_result | None] = {}
        root = self.folder / bucket
        for path in root.rglob("*") if bucket else ():
            key = path.relative_to(root).as_posix()
            if key.startswith(prefix) and path.is_file():
                head, found, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
                entries[prefix + head + delimiter if found else key] = None if found else path.stat()
        names = sorted(name for name in entries if name > after)
        chosen, more = names[:limit], len(names) > limit
        parts = [f"<Name>{escape(bucket)}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(chosen)}</KeyCount>"]
        parts.append(f"<MaxKeys>{limit}</MaxKeys><IsTruncated>{str(more).lower()}</IsTruncated>")
        if more:
            parts.append(f"<NextContinuationToken>{escape(chosen[-1])}</NextContinuationToken>")
        for name in chosen:
            stat = entries[name]
            if stat is None:
                parts.append(f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>")
                continue
            when = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(stat.st_mtime))
            tag = f"&quot;{stat.st_mtime_ns:x}-{stat.st_ino:x}-{stat.st_size:x}&quot;"
            parts.append(
                f"<Contents><Key>{escape(name)}</Key><LastModified>{when}</LastModified><ETag>{tag}</ETag>"
                f"<Size>{stat.st_size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
            )
        inner = "".join(parts)
        xmlns = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
        return f'<?xml version="1.0" encoding="UTF-8"?><ListBucketResult {xmlns}>{inner}</ListBucketResult>'.encode()

    def change(self, request: Request, path: Path, writer: asyncio.StreamWriter, is_object: bool) -> None:
        """PUT or DELETE; uploads in parts are refused."""
        if self.behaviour.refuse:
            code = "AccessDenied" if self.behaviour.refuse == 403 else "SlowDown"
            send(writer, self.behaviour.refuse, error(code, "as asked"))
        elif request.method == "PUT" and request.headers.get("if-none-match") == "*" and path.exists():
            send(writer, 412, error("PreconditionFailed", "there is one"))
        elif request.method == "PUT" and is_object and "uploadId" not in request.query:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(path.name + ".partial")
            partial.write_bytes(request.body)
            partial.replace(path)
            stat = path.stat()
            send(writer, 200, b"", {"ETag": f'"{stat.st_mtime_ns:x}-{stat.st_ino:x}-{stat.st_size:x}"'})
        elif request.method == "PUT" and not is_object:
            path.mkdir(exist_ok=True)
            send(writer, 200, b"")
        elif request.method == "DELETE" and is_object:
            path.unlink(missing_ok=True)
            send(writer, 204, b"")
        else:
            send(writer, 501, error("NotImplemented", "this store takes objects in one PUT"))


def span(wanted: str, size: int) -> tuple[int, int]:
    """Return begin and end of a Range header with one range."""
    first, _, last = wanted.removeprefix("bytes=").partition("-")
    if not first:
        return max(0, size - int(last)), size
    return int(first), min(size, int(last) + 1) if last else size


def error(code: str, message: str) -> bytes:
    """Return S3's form of an error."""
    return f"<Error><Code>{code}</Code><Message>{escape(message)}</Message></Error>".encode()


def start(writer: asyncio.StreamWriter, status: int, length: int, headers: dict[str, str] | None = None) -> None:
    """Write an answer's head."""
    lines = [f"HTTP/1.1 {status} {_REASONS[status]}", f"Content-Length: {length}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    writer.write(("\r\n".join(lines) + "\r\n\r\n").encode())


def send(writer: asyncio.StreamWriter, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
    """Write an answer."""
    start(writer, status, len(body), headers)
    writer.write(body)


async def read_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Request:
    """Read one request, and its body, which AWS's clients may send in signed chunks."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, target, _ = head[0].split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:-2])}
    path, _, query = target.partition("?")
    if headers.get("expect", "").lower() == "100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    body = b""
    if headers.get("transfer-encoding", "").lower() == "chunked":
        body = await read_chunks(reader)
    elif length := int(headers.get("content-length", 0)):
        body = await reader.readexactly(length)
    if headers.get("x-amz-content-sha256", "").startswith("STREAMING"):
        inner = asyncio.StreamReader()
        inner.feed_data(body)
        inner.feed_eof()
        body = await read_chunks(inner)
    values = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
    return Request(method, urllib.parse.unquote(path), values, headers, body)


async def read_chunks(reader: asyncio.StreamReader) -> bytes:
    """Read a body in chunks, and the lines that trail it."""
    parts = []
    while size := int((await reader.readline()).partition(b";")[0], 16):
        parts.append(await reader.readexactly(size))
        await reader.readline()
    while (await reader.readline()).strip():
        pass
    return b"".join(parts)


async def serve(folder: Path, behaviour: Behaviour) -> None:
    """Serve until standard input ends; the port goes to standard output."""
    server = await asyncio.start_server(_Server(folder, behaviour).connection, "127.0.0.1", 0, backlog=256)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    os._exit(0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("behaviour", type=lambda text: Behaviour(**json.loads(text)), nargs="?", default=Behaviour())
    options = parser.parse_args()
    asyncio.run(serve(options.folder, options.behaviour))
