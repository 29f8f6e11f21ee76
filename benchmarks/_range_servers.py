"""The stores of ``storage.py``'s table of ranges: one object behind plain HTTP, moto's S3 and rclone's, at a distance.

Plain HTTP is the store of the tests, which waits by itself. Before the others is a proxy, in a process of its own, that
waits and passes answers on; rclone's S3 answers 200 with a Content-Range to a question for a part, of which the proxy
makes the 206 that it means.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import multiprocessing
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from store_server import Store

__all__ = ["SERVERS", "Missing"]

_MOTO = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_PART = re.compile(rb"\r\ncontent-range:", re.IGNORECASE)


class Missing(Exception):
    """What a server needs is not installed."""


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int, delay: float) -> None:
    """Pass the requests of one connection on, which have no bodies, and their answers back."""
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        source, target = await asyncio.open_connection("127.0.0.1", port)
        try:
            while True:
                target.write(await reader.readuntil(b"\r\n\r\n"))
                head = await source.readuntil(b"\r\n\r\n")
                if delay:
                    await asyncio.sleep(delay)
                if _PART.search(head):
                    head = head.replace(b" 200 OK", b" 206 Partial Content", 1)
                length = _LENGTH.search(head)
                writer.write(head + await source.readexactly(int(length[1]) if length else 0))
                await writer.drain()
        finally:
            target.close()
    writer.close()


def _serve_proxy(port: int, delay: float, connection: Connection) -> None:
    async def main() -> None:
        server = await asyncio.start_server(lambda r, w: _forward(r, w, port, delay), "127.0.0.1", 0, limit=1 << 20)
        connection.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


@contextlib.contextmanager
def _proxy(port: int, delay: float) -> Iterator[str]:
    here, there = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=_serve_proxy, args=(port, delay, there), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{here.recv()}"
    finally:
        process.kill()
        process.join()


@contextlib.contextmanager
def plain(folder: Path, delay: float) -> Iterator[str]:
    """The store of the tests."""
    with Store(folder, latency=delay) as store:
        yield store.url


@contextlib.contextmanager
def moto(folder: Path, delay: float) -> Iterator[str]:
    """Moto's S3, with the folder's object.

    Raises:
        Missing: it is not installed.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", _MOTO], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        port = process.stdout.readline().strip()
        if not port:
            raise Missing("moto is not installed")
        client = http.client.HTTPConnection("127.0.0.1", int(port), timeout=60)
        for path, data in (("/bucket", b""), ("/bucket/big.bin", (folder / "bucket" / "big.bin").read_bytes())):
            client.request("PUT", path, data, {"x-amz-acl": "public-read"})
            client.getresponse().read()
        client.close()
        with _proxy(int(port), delay) as url:
            yield url
    finally:
        process.stdin.close()
        process.wait(20)


@contextlib.contextmanager
def rclone(folder: Path, delay: float) -> Iterator[str]:
    """``rclone serve s3``.

    Raises:
        Missing: there is no rclone on the path, nor beside this Python.
    """
    program = shutil.which("rclone", path=os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]))
    if program is None:
        raise Missing("there is no rclone on the path")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [program, "serve", "s3", "--addr", f"127.0.0.1:{port}", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 20
        while True:
            with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port), 1):
                break
            if time.monotonic() > until or process.poll() is not None:
                raise Missing("rclone does not start")
            time.sleep(0.02)
        with _proxy(port, delay) as url:
            yield url
    finally:
        process.terminate()
        process.wait(20)


SERVERS: dict[str, Callable[[Path, float], contextlib.AbstractContextManager[str]]] = {
    "plain HTTP": plain,
    "moto's S3": moto,
    "rclone's S3": rclone,
}
