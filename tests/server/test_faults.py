"""Servers, networks and clients that fail while jobs read: no row is lost, none comes twice, nobody waits for long.

What a single client does about each fault is in test_failover.py, and what it says in test_security.py; here are whole
jobs, data sets and loaders, over servers started with ``penstock serve``. ``PENSTOCK_TEST_SECONDS=60`` lets the longer
tests run for a minute.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from busy_support import slowness
from dataset_support import eventually
from full_run import full_only
from interpreter_support import FULL, SERVES, Popen
from jobs_support import Breaking, Job, Serve, Truth, anonymous, descriptors, serving_many
from server_support import Authority, Pipe, Share, authority, pages_of

from penstock import DataLoader, RankDataset, RankServerDataset
from penstock.errors import ServerError, ServerUnavailableError
from penstock.server import Client

__all__ = ["authority"]  # a fixture

SECONDS = float(os.environ.get("PENSTOCK_TEST_SECONDS", "2" if FULL else "1.2"))


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    return Truth(tmp_path_factory.mktemp("data") / "train.txt", 20_011)


def part(truth: Truth, **options: object) -> Share:
    fingerprint = truth.manifest.fingerprint
    return Share(name="train", fingerprint=fingerprint, samples=truth.rows, **options)  # type: ignore[arg-type]


def two_jobs(truth: Truth, addresses: list[str], **options: float) -> list[Job]:
    seconds = options.pop("seconds", SECONDS)
    return [
        Job(truth, addresses, seed=3, world_size=6, mini_epochs=2, seconds=seconds, **options),  # type: ignore[arg-type]
        Job(truth, addresses, seed=4, world_size=3, remainder="uneven", seconds=seconds, **options),  # type: ignore[arg-type]
    ]


def run(jobs: list[Job], disturb: Callable[[], None]) -> None:
    """The jobs, with something done again and again while they read."""
    for job in jobs:
        job.start()
    try:
        while any(job.running for job in jobs):
            disturb()
    finally:
        for job in jobs:
            job.join()
    print(*jobs, sep="; ")


class TestJobs:
    """Jobs of several ranks, each row of which is counted and compared."""

    @full_only("whole programs; test_failover.py restarts one, too")
    @pytest.mark.clock
    @pytest.mark.slow
    @pytest.mark.timeout(SECONDS + 600)
    def test_the_only_server_is_killed_and_restarted(self, truth: Truth) -> None:
        """Who waits for it goes on soon after it is there again: after a second's pause at the most, and the call."""
        down, after, slow = [], [], [1.0]
        with serving_many(truth.path) as [server]:

            def disturb() -> None:
                time.sleep(0.5)
                gone = time.monotonic()
                server.kill()
                server.start()
                back = time.monotonic()
                down.append(back - gone)
                eventually(lambda: not any(job.waits_since(back) for job in jobs), seconds=30)
                after.append(time.monotonic() - back)
                slow.append(slowness())

            jobs = two_jobs(truth, [server.address])
            run(jobs, disturb)
            assert statistics.median(after) < 3 * max(slow)
            # The only one: as long as it is away.
            assert max(job.longest for job in jobs) < max(3 * max(slow), 2 * max(slow) + max(down))

    @pytest.mark.clock
    @pytest.mark.slow
    @pytest.mark.timeout(SECONDS + 600)
    def test_one_of_two_is_killed(self, truth: Truth) -> None:
        chance, slow = random.Random(0), [1.0]
        with serving_many(truth.path, truth.path) as servers:

            def disturb() -> None:
                time.sleep(0.3)
                server = chance.choice(servers)
                server.kill()
                time.sleep(chance.random() / 2)
                server.start()
                slow.append(slowness())

            jobs = two_jobs(truth, [server.address for server in servers])
            run(jobs, disturb)
            assert max(job.longest for job in jobs) < 3 * max(slow)

    @full_only("seconds of faults at random; each has a test of its own")
    @pytest.mark.slow
    @pytest.mark.timeout(SECONDS + 600)
    def test_everything_at_once(self, truth: Truth) -> None:
        """Killed, stopped, frozen, told to reload, and a network that goes away."""
        chance = random.Random(1)
        with serving_many(truth.path, truth.path) as servers, closing(Pipe(servers[0].port)) as pipe:
            addresses = [pipe.address, *(server.address for server in servers)]

            def restart(number: int) -> None:
                servers[1].signal(number)
                servers[1].wait()
                time.sleep(chance.random() / 2)
                servers[1].start()

            def frozen() -> None:
                server = chance.choice(servers)
                server.signal(signal.SIGSTOP)
                time.sleep(4)
                server.signal(signal.SIGCONT)

            def cut() -> None:
                pipe.cut()
                time.sleep(chance.random() * 2)
                pipe.mend()

            faults = [lambda: restart(signal.SIGKILL), lambda: restart(signal.SIGTERM), frozen, cut]
            faults += [lambda: servers[0].signal(signal.SIGHUP)]

            def disturb() -> None:
                time.sleep(0.2)
                chance.choice(faults)()

            jobs = two_jobs(truth, addresses, timeout=3)  # less than one is frozen
            run(jobs, disturb)
            assert all(job.epoch for job in jobs)


class TestConnections:
    def test_connections_that_are_reset(self, truth: Truth) -> None:
        """At any byte: within headers, within a batch, or between two."""
        chance = random.Random(2)
        with serving_many(truth.path) as [server]:
            after = [chance.randrange(60_000) for _ in range(20)]
            with closing(Breaking(server.port, after)) as broken, Client(broken.address) as client:
                while after:
                    [*batches] = pages_of(client, part(truth, seed=1, page_rows=200))
                    numbers = [number for batch in batches for number in truth.numbers(batch).tolist()]
                    assert numbers == part(truth, seed=1).rows().tolist()
            after = [chance.randrange(6_000) for _ in range(20)]
            with closing(Breaking(server.port, after)) as broken, Client(broken.address) as client:
                while after:
                    wanted = [chance.randrange(truth.rows) for _ in range(50)]
                    batch = client.rows("train", truth.manifest.fingerprint, wanted)
                    assert truth.numbers(batch).tolist() == wanted

    @full_only("waits for real time-outs")
    @pytest.mark.clock("did not answer in time")
    @pytest.mark.slow
    def test_half_open_connections(self, truth: Truth) -> None:
        """A data set goes on elsewhere within the deadline; where there is no other server it says so in time."""
        options = {"rank": 0, "world_size": 1, "seed": 1}
        local = RankDataset(truth.manifest, **options)
        second = slowness()
        with serving_many(truth.path) as [server], closing(Pipe(server.port)) as pipe:
            addresses = [pipe.address, server.address]
            for again in range(2):  # the first address to be asked is drawn by lot
                dataset = RankServerDataset(Client(addresses, timeout=second), page_rows=100, **options)
                longest = 0.0
                for begin in range(0, 2000, 50):
                    if begin == 500:
                        pipe.cut()
                    before = time.monotonic()
                    indices = range(begin, begin + 50)
                    assert dataset.__getitems__(indices) == local.__getitems__(indices)
                    longest = max(longest, time.monotonic() - before)
                pipe.mend()
                dataset.close()
                assert longest < second + second, again
            client = Client(pipe.address, timeout=second, patience=0.5)
            dataset = RankServerDataset(client, page_rows=100, **options)
            for begin in range(0, 500, 50):
                dataset.__getitems__(range(begin, begin + 50))
            pipe.cut()
            before = time.monotonic()
            with pytest.raises(ServerUnavailableError, match=f"{pipe.address} did not answer in time"):
                for begin in range(500, 2000, 50):
                    dataset.__getitems__(range(begin, begin + 50))
            assert time.monotonic() - before < 2 * second + second
            pipe.mend()
            indices = range(500, 2000, 50)
            assert dataset.__getitems__(indices) == local.__getitems__(indices)
            dataset.close()

    @full_only("whole programs")
    @pytest.mark.slow
    def test_some_with_tls_and_one_without(self, truth: Truth, authority: Authority, tmp_path: Path) -> None:
        """Servers that do not let a client in are as good as none; the error names each of them, and why."""
        (tmp_path / "token").write_text("right")
        (tmp_path / "other").write_text("wrong")

        def serve(name: str, token: str, *, expired: bool = False) -> Serve:
            cert, key = authority.certificate(name, expired=expired)
            files = {"--tls-cert": cert, "--tls-key": key, "--token-file": tmp_path / token}
            return Serve(truth.path, *(str(word) for pair in files.items() for word in pair))

        with ExitStack() as stack:
            plain = Serve(truth.path, "--token-file", str(tmp_path / "token"))
            others = [serve("good", "token"), serve("old", "token", expired=True), serve("strange", "other")]
            for server in (plain, *others):
                stack.callback(server.close)
            addresses = [plain.address, *(server.address for server in others)]
            client = Client(addresses, token="right", tls_roots=authority.roots, timeout=2)
            for victim in (None, plain, others[0]):
                if victim is not None:
                    assert truth.numbers(next(pages_of(client, part(truth)))).size
                    victim.kill()
                if victim is not others[0]:
                    got = [
                        number for batch in pages_of(client, part(truth)) for number in truth.numbers(batch).tolist()
                    ]
                    assert sorted(got) == list(range(truth.rows))
            client.patience = 1
            with pytest.raises(ServerError) as caught:
                next(pages_of(client, part(truth)))
            for words in (
                f"{plain.address} is not available",
                f"{others[0].address} is not available",
                f"the certificate of {others[1].address} is not accepted: certificate has expired",
                f"{others[2].address}: the token is wrong",
            ):
                assert words in str(caught.value)


class TestClients:
    @pytest.mark.skipif(not FULL, reason="a race; test_service.py has who waits for whom; PENSTOCK_TEST_FULL=1")
    @pytest.mark.clock
    def test_slow_ones_do_not_slow_the_others(self, tmp_path: Path) -> None:
        truth = Truth(tmp_path / "train.txt", 400_000)
        with serving_many(truth.path, alone=True) as [server], Client(server.address) as client:
            whole = part(truth, seed=1)

            def seconds() -> float:
                begin = time.perf_counter()
                assert sum(batch.num_rows for batch in pages_of(client, whole)) == truth.rows
                return time.perf_counter() - begin

            seconds()
            alone = min(seconds() for _ in range(5))
            before = anonymous(server.pid)
            slow = [pages_of(client, whole) for _ in range(100)]
            for stream in slow:
                next(stream)  # and no more
            beside = min(seconds() for _ in range(5))
            until = time.monotonic() + 60  # the machine may be busy with something else for a while
            while beside >= 2 * alone and time.monotonic() < until:
                beside = min(beside, seconds())
            more = anonymous(server.pid) - before
            print(f"alone {alone * 1e3:.0f} ms, beside 100 slow ones {beside * 1e3:.0f} ms; {more:.0f} MiB more")
            assert beside < 2 * alone
            assert more < 100 * 2  # MiB: a page of half of one, and what it took to make it
            for stream in slow:
                stream.close()

    def test_clients_that_are_killed(self, truth: Truth) -> None:
        """In the middle of everything, again and again: the server lets go of what was theirs."""
        with serving_many(truth.path, alone=True) as [server]:
            files, memory = descriptors(server.pid), []
            for _ in range(4):
                with Popen(["-c", _READER, server.address], imports=SERVES, stdout=subprocess.PIPE) as reader:
                    try:
                        assert reader.stdout is not None
                        assert reader.stdout.readline() == "reading\n"
                        eventually(lambda: descriptors(server.pid) > files + 12)
                    finally:
                        reader.kill()
                eventually(lambda: descriptors(server.pid) <= files + 1)
                memory.append(anonymous(server.pid))
            assert statistics.median(memory[2:]) < memory[0] + 8
            with Client(server.address) as client:
                assert client.health() == {server.address: "ok"}

    @full_only("a whole program; test_server_dataset.py has workers")
    @pytest.mark.clock
    @pytest.mark.slow
    def test_loaders_with_workers(self, truth: Truth) -> None:
        """Worker processes read while the servers are killed in turn."""
        options = {"rank": 1, "world_size": 4, "seed": 5}
        local = [row for _, _, row in RankDataset(truth.manifest, **options)]
        with serving_many(truth.path, truth.path) as servers:
            addresses = [server.address for server in servers]
            dataset = RankServerDataset(addresses, page_rows=64, **options)
            loader = DataLoader(dataset, batch_size=16, num_workers=2)
            rows: list[int] = []
            longest = 0.0
            batches = iter(loader)
            for number in range(len(loader)):
                if number in (50, 150, 250):
                    servers[number // 100 % 2].kill()
                if number in (100, 200, 300):
                    servers[(number - 50) // 100 % 2].start()
                before = time.monotonic()
                rows += next(batches)[2].tolist()
                longest = max(longest, time.monotonic() - before)
            assert rows == local
            assert longest < 3 or longest < 3 * slowness()
            del batches
            loader.close()


_READER = """
import sys, threading
from penstock.server import Client
client = Client(sys.argv[1])
info = client.info()
pages = [range(start, start + 64) for start in range(0, info.rows - 64, 64)]
ready = threading.Barrier(17)
def stream():
    batches = client.batches(info.name, info.fingerprint, pages)
    next(batches)
    ready.wait()
    for _ in range(10**9):
        for batch in client.batches(info.name, info.fingerprint, pages): pass
def by_number():
    client.rows(info.name, info.fingerprint, [1])
    ready.wait()
    while True:
        client.rows(info.name, info.fingerprint, [5, 7] * 500)
for number in range(16):
    threading.Thread(target=stream if number % 2 else by_number, daemon=True).start()
ready.wait()
print("reading", flush=True)
threading.Event().wait()
"""
