"""The cache of another node beside the store: MB/s, and what a MB costs both sides, on loopback.

The store (tests/support/store_server.py) is a process that sends files by HTTP, as fast as it can and with a latency
before each answer. The other node is ``penstock serve --cache-folder``, with all objects in its cache. Each way is
measured in turn, with the same number of requests of 4 MiB under way: into memory, by a stream, and into an empty
cache, which also hashes and syncs. "HTTP alone" is threads with `http.client` that read into a buffer and check
nothing. CPU is milliseconds a MB, of this process and of the one that sends. What comes is compared with the file
before.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from store_server import Store

from _common import folder, parse, spread, table
from penstock.server import CacheClient
from penstock.storage import Cache, Storage

BLOCK, PARALLEL = 4 << 20, 8


@contextlib.contextmanager
def served(cache: Path, ready: Path) -> Iterator[tuple[str, int]]:
    """The address of a server of a cache, and its process."""
    command = [sys.executable, "-m", "penstock", "serve", "--cache-folder", str(cache), "--ready-file", str(ready)]
    command += ["--port", "0", "--log-level", "warning"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            while not ready.exists():
                if process.poll() is not None:
                    raise SystemExit(f"penstock serve ended with {process.returncode}")
                time.sleep(0.002)
            yield ready.read_text().strip(), process.pid
        finally:
            process.terminate()


def alone(urls: list[str], size: int) -> None:
    """Threads that each keep a connection and read one range after the other into one buffer."""
    ranges = iter([(url, begin) for url in urls for begin in range(0, size, BLOCK)])
    lock = threading.Lock()

    def work() -> None:
        host, path = urls[0].removeprefix("http://").split("/", 1)
        client, buffer = http.client.HTTPConnection(host), memoryview(bytearray(BLOCK))
        while True:
            with lock:
                url, begin = next(ranges, ("", 0))
            if not url:
                break
            path = url.removeprefix(f"http://{host}")
            client.request("GET", path, headers={"Range": f"bytes={begin}-{begin + BLOCK - 1}"})
            answer, got = client.getresponse(), 0
            while got < BLOCK:
                got += answer.readinto(buffer[got:])
            answer.read()
        client.close()

    threads = [threading.Thread(target=work) for _ in range(PARALLEL)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def streamed(urls: list[str], storage: Storage, buffer: bytearray) -> None:
    """All objects, one after the other, into one buffer."""
    for url in urls:
        with storage.open(url).stream() as file:
            while file.readinto(buffer):
                pass


def copied(urls: list[str], storage: Storage) -> None:
    """All objects into a cache, which is empty."""
    for url in urls:
        storage.local_path(url)


def measure(ways: dict[str, tuple[Callable[[], None], int]], size: float, repeat: int) -> list[tuple[object, ...]]:
    """Rows: MB/s, and CPU of both sides, for functions and the processes that send."""
    rates, own, other = (defaultdict[str, list[float]](list) for _ in range(3))
    for _ in range(repeat):
        for name, (read, pid) in ways.items():
            sender = psutil.Process(pid)
            theirs, ours, start = sum(sender.cpu_times()[:2]), time.process_time(), time.perf_counter()
            read()
            rates[name].append(size / (time.perf_counter() - start))
            own[name].append(1e3 * (time.process_time() - ours) / size)
            other[name].append(1e3 * (sum(sender.cpu_times()[:2]) - theirs) / size)
    median = statistics.median
    return [(n, *spread(rates[n]), f"{median(own[n]):.2f}", f"{median(other[n]):.2f}") for n in ways]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--objects", type=int, default=8, help="how many (default: %(default)s)")
    parser.add_argument("--size", type=int, default=32, help="MiB of each (default: %(default)s)")
    parser.add_argument("--repeat", type=int, default=5, help="how often each is measured (default: %(default)s)")
    parser.add_argument("--latency", type=float, nargs="+", default=[0, 5, 50], help="ms (default: %(default)s)")
    parser.add_argument("--dir", default=None, help="folder for the files (default: a temporary one)")
    options = parse(parser, {"objects": 2, "size": 8, "repeat": 1})
    with folder(options.dir) as where, contextlib.ExitStack() as stack:
        (where / "store" / "data").mkdir(parents=True)
        for number in range(options.objects):
            (where / "store" / "data" / str(number)).write_bytes(os.urandom(options.size << 20))
        stores = {ms: stack.enter_context(Store(where / "store", latency=ms / 1e3)) for ms in options.latency}
        urls = {ms: [f"{store.url}/data/{n}" for n in range(options.objects)] for ms, store in stores.items()}
        far, first = max(stores), min(stores)
        for ms in {first, far}:
            copied(urls[ms], Storage(cache=where / "node"))
        address, pid = stack.enter_context(served(where / "node", where / "ready"))
        peer = CacheClient(address)
        buffer, empty = bytearray(1 << 20), where / "empty"

        def storage(peer: CacheClient | None) -> Storage:
            shutil.rmtree(empty, ignore_errors=True)
            return Storage(cache=Cache(empty), peer=peer, parallel=PARALLEL, block=BLOCK)

        for url in urls[far]:
            copy = storage(peer).local_path(url)
            assert Path(copy).read_bytes() == (where / "store" / "data" / url.rpartition("/")[2]).read_bytes()
        size = (options.objects * options.size << 20) / 1e6
        senders = {ms: store.pid for ms, store in stores.items()}
        memory = {f"HTTP alone, {first:g} ms": (lambda: alone(urls[first], options.size << 20), senders[first])}
        disk: dict[str, tuple[Callable[[], None], int]] = {}
        for ms in stores:
            named = f"the store, {ms:g} ms"
            memory[named] = (lambda ms=ms: streamed(urls[ms], storage(None), buffer), senders[ms])
            disk[named] = (lambda ms=ms: copied(urls[ms], storage(None)), senders[ms])
        # Versions are looked up in the store, one request for each object.
        for ms in dict.fromkeys([first, far]):
            named = f"the cache of another node, the store at {ms:g} ms"
            memory[named] = (lambda ms=ms: streamed(urls[ms], storage(peer), buffer), pid)
            disk[named] = (lambda ms=ms: copied(urls[ms], storage(peer)), pid)
        columns = ["from", "MB/s: min", "median", "max", "CPU ms a MB here", "there"]
        about = f"{options.objects} objects of {options.size} MiB, {PARALLEL} requests of {BLOCK >> 20} MiB under way"
        for title, ways in (("Into memory", memory), ("Into an empty cache", disk)):
            table(f"{title}: {about}", columns, measure(ways, size, options.repeat), peer=f"the store, {first:g} ms")
        peer.close()


if __name__ == "__main__":
    main()
