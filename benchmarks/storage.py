"""Remote reading against plain parallel ranged GETs of the same bytes, with the same number under way.

The server runs in a process of its own on 127.0.0.1, as fast as it can, and then like a store at a distance: a delay
before each answer, and a rate for each connection. Peers: threads with `http.client`, which read into a buffer and
check nothing; aiohttp; fsspec's file; our stream; our download into the cache.

Then ranges at random, from three stores at three distances (_range_servers.py): ours, which checks the version of each;
threads with `http.client`; s3fs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import http.server
import multiprocessing
import os
import random
import shutil
import socketserver
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from _common import folder, interleave, parse, remark, spread, table
from _range_servers import SERVERS, Missing
from penstock.storage import Cache, Storage, open_source

BLOCK, PARALLEL = 4 << 20, 8


class Handler(http.server.BaseHTTPRequestHandler):
    """Ranges of zeros."""

    protocol_version = "HTTP/1.1"
    size, delay, rate = 0, 0.0, 0.0
    data = bytes(1 << 20)

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        first, _, last = self.headers.get("Range", f"bytes=0-{self.size - 1}").removeprefix("bytes=").partition("-")
        begin, end = int(first), int(last) + 1
        time.sleep(self.delay)
        self.send_response(206)
        self.send_header("Content-Length", str(end - begin))
        self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{self.size}")
        self.send_header("ETag", '"1"')
        self.end_headers()
        started, sent = time.perf_counter(), 0
        while sent < end - begin:
            piece = min(len(self.data), end - begin - sent)
            if self.rate:
                piece = min(piece, 1 << 18)
                time.sleep(max(0.0, started + sent / self.rate - time.perf_counter()))
            self.wfile.write(memoryview(self.data)[:piece])
            sent += piece


class Server(http.server.ThreadingHTTPServer):
    """Says nothing of clients that leave early, as fsspec's does."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


def serve(size: int, delay: float, rate: float, connection: Connection) -> None:
    Handler.size, Handler.delay, Handler.rate = size, delay, rate
    Handler.disable_nagle_algorithm = True
    socketserver.ThreadingMixIn.daemon_threads = True
    with Server(("127.0.0.1", 0), Handler) as server:
        connection.send(server.server_address[1])
        server.serve_forever()


@contextlib.contextmanager
def server(size: int, delay: float, rate: float) -> Iterator[int]:
    here, there = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(size, delay, rate, there), daemon=True)
    process.start()
    try:
        yield here.recv()
    finally:
        process.kill()
        process.join()


def plain(port: int, size: int) -> None:
    """Threads that each keep a connection and read one range after the other into one buffer."""
    begins = iter(range(0, size, BLOCK))
    lock = threading.Lock()

    def work() -> None:
        client = http.client.HTTPConnection("127.0.0.1", port)
        buffer = memoryview(bytearray(BLOCK))
        while True:
            with lock:
                begin = next(begins, None)
            if begin is None:
                break
            end = min(begin + BLOCK, size)
            client.request("GET", "/object", headers={"Range": f"bytes={begin}-{end - 1}"})
            answer, got = client.getresponse(), 0
            while got < end - begin:
                got += answer.readinto(buffer[got : end - begin])
            answer.read()
        client.close()

    threads = [threading.Thread(target=work) for _ in range(PARALLEL)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def plain_aiohttp(port: int, size: int) -> None:
    """The same by the client under fsspec."""
    import aiohttp

    async def main() -> None:
        begins = iter(range(0, size, BLOCK))
        async with aiohttp.ClientSession(auto_decompress=False) as session:

            async def work() -> None:
                for begin in begins:
                    end = min(begin + BLOCK, size)
                    headers = {"Range": f"bytes={begin}-{end - 1}"}
                    async with session.get(f"http://127.0.0.1:{port}/object", headers=headers) as answer:
                        assert len(await answer.read()) == end - begin

            await asyncio.gather(*(work() for _ in range(PARALLEL)))

    asyncio.run(main())


def fsspec_file(port: int, size: int) -> None:
    """fsspec's file, read from beginning to end with its read-ahead."""
    import fsspec

    with fsspec.open(f"http://127.0.0.1:{port}/object", block_size=BLOCK).open() as file:
        done = 0
        while data := file.read(1 << 20):
            done += len(data)
        assert done == size


def ours(port: int, size: int) -> None:
    with open_source(f"http://127.0.0.1:{port}/object").stream() as file:
        buffer, done = bytearray(1 << 20), 0
        while count := file.readinto(buffer):
            done += count
        assert done == size


def cached(port: int, size: int) -> None:
    folder = tempfile.mkdtemp(prefix="penstock-bench-")
    try:
        copy = Storage(cache=Cache(folder)).open(f"http://127.0.0.1:{port}/object").local()  # type: ignore[union-attr]
        assert copy.size == size
    finally:
        shutil.rmtree(folder)


Ranges = Callable[[list[int]], None]
"""Reads the ranges that begin there."""


def ranges_of_ours(url: str, size: int) -> Ranges:
    """By `RemoteSource.fetch`: plain HTTP by its address, the others as S3."""
    host, is_s3 = url.removesuffix("/bucket"), url.endswith("/bucket")
    storage = Storage(
        {"endpoint_url": host, "key": "any", "secret": "any", "region_name": "us-east-1"} if is_s3 else {}
    )
    source: Any = open_source("s3://bucket/big.bin" if is_s3 else f"{url}/bucket/big.bin", storage=storage)
    pool = ThreadPoolExecutor(PARALLEL)
    return lambda begins: sum_up(pool.map(lambda begin: len(source.fetch(begin, begin + size)), begins), size, begins)


def ranges_of_client(url: str, size: int) -> Ranges:
    """Threads that keep a connection each."""
    kept, path = threading.local(), "/bucket/big.bin"
    host = url.removesuffix("/bucket").removeprefix("http://")
    pool = ThreadPoolExecutor(PARALLEL)

    def read(begin: int) -> int:
        client = getattr(kept, "client", None)
        if client is None:
            client = kept.client = http.client.HTTPConnection(host)
        client.request("GET", path, headers={"Range": f"bytes={begin}-{begin + size - 1}"})
        return len(client.getresponse().read())

    return lambda begins: sum_up(pool.map(read, begins), size, begins)


def ranges_of_s3fs(url: str, size: int) -> Ranges:
    """Its ``_cat_file``, so many at a time on its loop.

    Raises:
        ImportError: s3fs is not installed.
    """
    import fsspec.asyn
    from s3fs import S3FileSystem

    system = S3FileSystem(
        endpoint_url=url.removesuffix("/bucket"), key="any", secret="any", client_kwargs={"region_name": "us-east-1"}
    )

    async def read(begins: list[int]) -> list[int]:
        limit = asyncio.Semaphore(PARALLEL)

        async def one(begin: int) -> int:
            async with limit:
                return len(await system._cat_file("bucket/big.bin", start=begin, end=begin + size))

        return await asyncio.gather(*map(one, begins))

    return lambda begins: sum_up(fsspec.asyn.sync(system.loop, read, begins), size, begins)


def sum_up(lengths: Any, size: int, begins: list[int]) -> None:
    """Check that all of them came."""
    assert sum(lengths) == size * len(begins)


def compare_ranges(size: int, range_size: int, count: int, repeat: int) -> None:
    """Print ranges a second, MB a second and processor time for each server and distance."""
    peers = {"penstock": ranges_of_ours, "http.client, threads": ranges_of_client, "s3fs": ranges_of_s3fs}
    rows: list[tuple[object, ...]] = []
    rng = random.Random(0)
    begins = [rng.randrange(0, size - range_size) // 4096 * 4096 for _ in range(count)]
    with folder(None) as root:
        (root / "bucket").mkdir()
        (root / "bucket" / "big.bin").write_bytes(os.urandom(size))
        for name, delay in [(name, delay) for name in SERVERS for delay in (0.0, 0.005, 0.05)]:
            try:
                with SERVERS[name](root, delay) as url:
                    rows += measured(
                        name, delay, url if name == "plain HTTP" else f"{url}/bucket", peers, begins, range_size, repeat
                    )
            except Missing as error:
                remark(f"{name} is left out: {error}")
    table(
        f"{count} ranges of {range_size >> 10} KiB at random, {PARALLEL} under way",
        ("server", "reader", "ranges/s: min", "median", "max", "MB/s", "CPU us a range"),
        rows,
    )


def measured(
    name: str, delay: float, url: str, peers: Any, begins: list[int], size: int, repeat: int
) -> Iterator[tuple[object, ...]]:
    """Measure the peers in turn with one server; yields rows."""
    readers: dict[str, Ranges] = {}
    for peer, make in peers.items():
        try:
            readers[peer] = make(url, size)
            readers[peer](begins[:PARALLEL])
        except ImportError as error:
            remark(f"{peer} is left out: {error}")
    samples = interleave({peer: lambda read=read: read(begins) for peer, read in readers.items()}, repeat)
    for peer, sample in samples.items():
        cpu = sorted(sample.cpu)[len(sample.cpu) // 2] / len(begins) * 1e6
        speeds = spread([len(begins) / wall for wall in sample.wall])
        mega = f"{len(begins) * size / sample.median / 1e6:.0f}"
        yield f"{name}, {delay * 1e3:g} ms", peer, *speeds, mega, f"{cpu:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--size", type=int, default=256, help="MiB of the object (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=5, help="how often each is measured (default: %(default)s)")
    parser.add_argument("--ranges", type=int, default=400, help="ranges of 64 KiB at random (default: %(default)s)")
    options = parse(parser, {"size": 16, "repeat": 1, "ranges": 16}, ["obstore", "s3fs", "moto"])
    size = options.size << 20
    peers: dict[str, Callable[[int, int], None]] = {
        "plain GETs, http.client": plain,
        "plain GETs, aiohttp": plain_aiohttp,
        "fsspec file": fsspec_file,
        "penstock stream": ours,
        "penstock cache (with fsync)": cached,
    }
    for title, delay, rate in (("as fast as it can", 0.0, 0.0), ("20 ms away, 25 MB/s a connection", 0.02, 25e6)):
        with server(size, delay, rate) as port:
            chosen = {name: peer for name, peer in peers.items() if not (rate and peer is fsspec_file)}
            ours(port, size)
            samples = interleave(
                {name: lambda peer=peer: peer(port, size) for name, peer in chosen.items()}, options.repeat
            )
        best = min(samples["plain GETs, http.client"].median, samples["plain GETs, aiohttp"].median)
        rows = [
            (
                name,
                *spread([size / 1e6 / t for t in s.wall]),
                f"{sorted(s.cpu)[len(s.cpu) // 2]:.2f}",
                f"{best / s.median:.0%}",
            )
            for name, s in samples.items()
        ]
        table(
            f"{options.size} MiB, {PARALLEL} requests of {BLOCK >> 20} MiB; server {title}",
            ("reader", "MB/s: min", "median", "max", "CPU s", "of the best plain"),
            rows,
            peer="plain GETs, http.client",
        )
    # A part costs moto a copy of the object.
    compare_ranges(min(size, 16 << 20), 1 << 16, options.ranges, options.repeat)


if __name__ == "__main__":
    main()
