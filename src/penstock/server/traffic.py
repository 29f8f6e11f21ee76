"""What a server has delivered: counts by data set, who is connected, and the last minutes second by second.

`Traffic` is the observer of a server. It keeps numbers only, so metrics, status page and log read from one place:

    traffic = Traffic()
    with Server({"train": "train.txt"}, observer=traffic) as server:
        traffic.serve(["train"])
        ...
        traffic.snapshot().datasets["train"].rows

Promises: memory does not depend on how long it runs, on how many clients there were, or on what they ask for; an
observation costs one lock and a few microseconds.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

from penstock.server.logs import Log

__all__ = ["Client", "Counts", "History", "Snapshot", "Traffic", "host_of"]

_REMEMBERED = 60.0  # seconds that a client is shown after its last stream
_CLIENTS = 4096  # machines remembered at most, beside those with a stream
_KINDS = 64  # kinds of errors counted apart for each data set


class History:
    """Rows and bytes of each of the last seconds, in memory of fixed size.

    A second is complete once the next one has begun; `last` gives complete ones only.
    """

    SECONDS = 300

    def __init__(self) -> None:
        slots = self.SECONDS + 1
        self._second = [-1] * slots
        self._rows = [0] * slots
        self._bytes = [0] * slots

    def add(self, second: int, rows: int, nbytes: int) -> None:
        """Add to one second."""
        slot = second % len(self._second)
        if self._second[slot] != second:
            self._second[slot], self._rows[slot], self._bytes[slot] = second, 0, 0
        self._rows[slot] += rows
        self._bytes[slot] += nbytes

    def last(self, now: int, seconds: int) -> list[tuple[int, int]]:
        """(rows, bytes) of each of the seconds before ``now``, the oldest first."""
        result = []
        for second in range(now - seconds, now):
            slot = second % len(self._second)
            there = self._second[slot] == second
            result.append((self._rows[slot], self._bytes[slot]) if there else (0, 0))
        return result


@dataclass(frozen=True, slots=True)
class Counts:
    """Of one data set, since the server was started."""

    rows: int
    bytes: int
    streams: int
    active: int
    errors: Mapping[str, int]
    history: Sequence[tuple[int, int]]
    """(rows, bytes) of each complete second of the last `History.SECONDS`, the oldest first."""

    def rate(self, seconds: int = 10) -> tuple[float, float]:
        """Rows/s and bytes/s over the last seconds."""
        last = self.history[-seconds:]
        return sum(rows for rows, _ in last) / len(last), sum(size for _, size in last) / len(last)


@dataclass(frozen=True, slots=True)
class Client:
    """A machine with a stream now, or within the last minute."""

    host: str
    active: int
    streams: int
    """Since it was first seen, or seen again."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything at one moment."""

    started: float
    """Unix time."""
    uptime: float
    datasets: Mapping[str, Counts]
    clients: Sequence[Client]
    errors: Mapping[str, int]
    """Of requests that name no data set, by kind."""

    def history(self) -> list[tuple[int, int]]:
        """(rows, bytes) of each second, of all data sets together."""
        each = [counts.history for counts in self.datasets.values()]
        if not each:
            return [(0, 0)] * History.SECONDS
        return [(sum(r for r, _ in second), sum(b for _, b in second)) for second in zip(*each, strict=True)]

    @property
    def error_count(self) -> int:
        """All errors."""
        named = sum(sum(counts.errors.values()) for counts in self.datasets.values())
        return named + sum(self.errors.values())

    @property
    def active(self) -> int:
        """Streams that are open now."""
        return sum(counts.active for counts in self.datasets.values())


class _DataSet:
    def __init__(self) -> None:
        self.rows = self.bytes = self.streams = self.active = 0
        self.errors: Counter[str] = Counter()
        self.history = History()

    def counts(self, now: int) -> Counts:
        history = self.history.last(now, History.SECONDS)
        return Counts(self.rows, self.bytes, self.streams, self.active, dict(self.errors), history)


class _Client:
    def __init__(self) -> None:
        self.active = self.streams = 0
        self.seen = 0.0


class Traffic:
    """The observer of a server, see the module. Safe in threads.

    Args:
        log: also told about errors, and at level "debug" about each stream.
        clock: seconds, monotonic.
    """

    def __init__(self, log: Log | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._clock = log, clock
        self._lock = threading.Lock()
        self._datasets: dict[str, _DataSet] = {}
        self._clients: dict[str, _Client] = {}
        self._errors: Counter[str] = Counter()
        self._started, self._began = time.time(), clock()

    def serve(self, names: Iterable[str]) -> None:
        """Know these data sets: they count from 0, and errors of other names count as those that name none."""
        with self._lock:
            for name in names:
                self._dataset(name)

    # What a server tells.

    def stream_started(self, name: str, peer: str) -> None:
        """A stream of a data set to a peer begins."""
        now, host = self._clock(), host_of(peer)
        with self._lock:
            dataset = self._dataset(name)
            dataset.streams += 1
            dataset.active += 1
            client = self._clients.get(host)
            if client is None:
                self._forget(now, room=True)
                client = self._clients[host] = _Client()
            client.streams += 1
            client.active += 1
            client.seen = now
        if self._log is not None:
            self._log.often("debug", "stream started", dataset=name, peer=peer)

    def rows(self, name: str, count: int, nbytes: int) -> None:
        """So many rows were handed to the transport, in so many bytes."""
        second = int(self._clock())
        with self._lock:
            dataset = self._dataset(name)
            dataset.rows += count
            dataset.bytes += nbytes
            dataset.history.add(second, count, nbytes)

    def stream_ended(self, name: str, peer: str, error: str | None) -> None:
        """A stream ended; with the reason, if not as it should."""
        now, host = self._clock(), host_of(peer)
        with self._lock:
            self._dataset(name).active -= 1
            client = self._clients[host]  # those with a stream are not forgotten
            client.active -= 1
            client.seen = now
        if self._log is not None:
            level = "debug" if error is None else "info"
            more = {} if error is None else {"error": error}
            self._log.often(level, "stream ended", dataset=name, peer=peer, **more)

    def error(self, name: str | None, kind: str) -> None:
        """A request failed or was refused."""
        with self._lock:
            known = None if name is None else self._datasets.get(name)
            errors = self._errors if known is None else known.errors  # names are whatever a client sends
            errors[kind if kind in errors or len(errors) < _KINDS else "other"] += 1
        if self._log is not None:
            self._log.often("warning", "error", kind=kind, dataset=name)

    # What it knows.

    def snapshot(self) -> Snapshot:
        """Everything at this moment."""
        now = self._clock()
        with self._lock:
            self._forget(now)
            datasets = {name: self._datasets[name].counts(int(now)) for name in sorted(self._datasets)}
            clients = [Client(host, c.active, c.streams) for host, c in sorted(self._clients.items())]
            errors = dict(self._errors)
        return Snapshot(self._started, now - self._began, datasets, clients, errors)

    def _dataset(self, name: str) -> _DataSet:
        dataset = self._datasets.get(name)
        if dataset is None:
            dataset = self._datasets[name] = _DataSet()
        return dataset

    def _forget(self, now: float, *, room: bool = False) -> None:
        """Forget clients that have been gone for a while; with `room`, only if there are many, the oldest half."""
        if room and len(self._clients) < _CLIENTS:
            return
        idle = sorted((client.seen, host) for host, client in self._clients.items() if not client.active)
        gone = {host for seen, host in idle if seen < now - _REMEMBERED}
        if room:
            gone.update(host for _, host in idle[: (len(idle) + 1) // 2])
        for host in gone:
            del self._clients[host]


def host_of(peer: str) -> str:
    """The machine in a gRPC peer: ``"ipv4:10.0.0.7:51234"`` -> ``"10.0.0.7"``."""
    family, _, rest = unquote(peer).partition(":")
    if family not in ("ipv4", "ipv6"):
        return peer
    return rest.rpartition(":")[0].strip("[]")
