"""Programs that fork, run in processes where nobody else uses gRPC: ``fork_programs.py NAME ADDRESS FILE``.

They end with exit code 0 if all was well. Children that hang are killed by an alarm.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parents[1] / "support"))

from busy_support import HANG
from interpreter_support import METHODS
from server_support import expected, lines, pages_of, random_rows, whole

from penstock.manifest import Manifest
from penstock.server import Client, Server

# From 3.12 on, Python warns of forks of processes with threads, which is what these programs try.
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)


def in_child(what: Callable[[], bool]) -> None:
    """Fork, and see that it is true in the child."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(int(HANG))
        ok = False
        try:
            ok = what()
        finally:
            os._exit(0 if ok else 1)
    status = os.waitpid(pid, 0)[1]
    assert status == 0, f"the child ended with {status}"


def right(client: Client, manifest: Manifest, seed: int) -> bool:
    """Whether rows by number come as they should."""
    rows = random_rows(len(manifest), 100, seed)
    return bool(client.rows("train", manifest.fingerprint, rows).column(0) == manifest.raw(rows))


def in_the_middle(client: Client, manifest: Manifest) -> None:
    """Forks while a slice is read here, and rows in two other threads."""
    part = whole(client, seed=1)
    stop = threading.Event()
    wrong: list[bool] = []

    def others() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            if not right(client, manifest, number):
                wrong.append(True)

    threads = [threading.Thread(target=others, daemon=True) for _ in range(2)]
    assert right(client, manifest, 0)  # a fork while another thread imports something would leave the import locked
    for thread in threads:
        thread.start()
    got = []
    for number, batch in enumerate(pages_of(client, part)):
        got.append(batch)
        in_child(lambda n=number: right(client, manifest, n) and len(lines(pages_of(client, part))) == len(manifest))
    stop.set()
    for thread in threads:
        thread.join()
    assert number > 3
    assert not wrong
    assert lines(got) == expected(manifest, part)


def of_a_fork(client: Client, manifest: Manifest) -> None:
    """A fork in a forked process."""

    def child() -> bool:
        assert right(client, manifest, 1)
        in_child(lambda: right(client, manifest, 2))
        return right(client, manifest, 3)

    assert right(client, manifest, 0)
    in_child(child)


def _work(client: Client, manifest: Manifest, results: Any) -> None:
    results.put(right(client, manifest, 5) and len(lines(pages_of(client, whole(client)))))


def workers(client: Client, manifest: Manifest, *methods: str) -> None:
    """Workers of multiprocessing, with a slice under way here."""
    for method in methods or METHODS:
        stream = pages_of(client, whole(client))
        head = next(stream)
        assert right(client, manifest, 0)
        context: Any = multiprocessing.get_context(method)
        results = context.Queue()
        both = [context.Process(target=_work, args=(client, manifest, results)) for _ in range(2)]
        for one in both:
            one.start()
        assert [results.get(timeout=HANG) for _ in both] == [len(manifest)] * 2, method
        for one in both:
            one.join(20)
            assert one.exitcode == 0
        assert len(lines([head, *stream])) == len(manifest)


def beside_a_server(client: Client, manifest: Manifest) -> None:
    """gRPC cannot be stopped here, so the child must say so; and all goes on here."""

    def child() -> bool:
        try:
            client.info()
        except Exception as error:
            return type(error).__name__ == "ServerForkError" and "forkserver" in str(error)
        return False

    with Server({"other": manifest}) as server:
        stream = pages_of(client, whole(client))
        head = next(stream)
        in_child(child)
        assert len(lines([head, *stream])) == len(manifest)
    assert right(client, manifest, 1)
    in_child(lambda: right(client, manifest, 2))  # a server that is closed does not matter
    assert server.wait(0)


if __name__ == "__main__":
    name, address, file = sys.argv[1:]
    program: Callable[[Client, Manifest], None] = globals()[name]
    program(Client(address), Manifest.open(file))
