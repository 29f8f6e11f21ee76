"""The traffic of a server: counts by dataset, connected clients, and the last minutes second by second.

`Traffic` is an observer of a server. Metrics, status page and log all read its numbers:

    traffic = Traffic()
    with Server({"train": "train.txt"}, observer=traffic) as server:
        traffic.serve(["train"])
        ...
        traffic.snapshot().datasets["train"].rows

Promises: memory does not depend on the running time, the number of clients or their requests; an event costs one lock
and a few microseconds.
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

_REMEMBERED = 60.0  # seconds for which a client is shown after its last stream
_CLIENTS = 4096  # maximum number of remembered clients without a stream
_KINDS = 64  # kinds of errors counted separately for each dataset


class History:
    """Rows and bytes of each of the last seconds, in fixed memory.

    A second is complete when the next one has begun; `last` returns complete seconds only.
    """

    SECONDS = 300

    def __init__(self) -> None:
        slots = self.SECONDS + 1
        self._second = [-1] * slots
        self._rows = [0] * slots
        self._bytes = [0] * slots

    def add(self, second: int, rows: int, nbytes: int) -> None:
        """Add to the counts of a second."""
        slot = second % len(self._second)
        if self._second[slot] != second:
            self._second[slot], self._rows[slot], self._bytes[slot] = second, 0, 0
        self._rows[slot] += rows
        self._bytes[slot] += nbytes

    def last(self, now: int, seconds: int) -> list[tuple[int, int]]:
        """Return (rows, bytes) of each second before ``now``, the oldest first."""
        result = []
        for second in range(now - seconds, now):
            slot = second % len(self._second)
            there = self._second[slot] == second
            result.append((self._rows[slot], self._bytes[slot]) if there else (0, 0))
        return result


@dataclass(frozen=True, slots=True)
class Counts:
    """The counts of one dataset since the server started."""

    rows: int
    bytes: int
    streams: int
    active: int
    errors: Mapping[str, int]
    history: Sequence[tuple[int, int]]
    """(rows, bytes) of each complete second of the last `History.SECONDS`, the oldest first."""

    def rate(self, seconds: int = 10) -> tuple[float, float]:
        """Return rows/s and bytes/s over the last seconds."""
        last = self.history[-seconds:]
        return sum(rows for rows, _ in last) / len(last), sum(size for _, size in last) / len(last)


@dataclass(frozen=True, slots=True)
class Client:
    """A machine with a stream now or in the last minute."""

    host: str
    active: int
    streams: int
    """Streams since it was first seen, or seen again."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All numbers at one moment."""

    started: float
    """Unix time."""
    uptime: float
    datasets: Mapping[str, Counts]
    clients: Sequence[Client]
    errors: Mapping[str, int]
    """Errors of requests without a dataset name, by kind."""

    def history(self) -> list[tuple[int, int]]:
        """Return (rows, bytes) of each second, summed over all datasets."""
        each = [counts.history for counts in self.datasets.values()]
        if not each:
            return [(0, 0)] * History.SECONDS
        return [(sum(r for r, _ in second), sum(b for _, b in second)) for second in zip(*each, strict=True)]

    @property
    def error_count(self) -> int:
        """The number of all errors."""
        named = sum(sum(counts.errors.values()) for counts in self.datasets.values())
        return named + sum(self.errors.values())

    @property
    def active(self) -> int:
        """The number of open streams."""
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
    """The observer of a server, see the module. Thread-safe.

    Args:
        log: receives errors, and at level "debug" each stream.
        clock: returns monotonic seconds.
    """

    def __init__(self, log: Log | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._clock = log, clock
        self._lock = threading.Lock()
        self._datasets: dict[str, _DataSet] = {}
        self._clients: dict[str, _Client] = {}
        self._errors: Counter[str] = Counter()
        self._started, self._began = time.time(), clock()

    def serve(self, names: Iterable[str]) -> None:
        """Register datasets: they count from 0. Errors of other names count as errors without a name."""
        with self._lock:
            for name in names:
                self._dataset(name)

    # Events of the server.

    def stream_started(self, name: str, peer: str) -> None:
        """Count the start of a stream."""
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
        """Count rows and bytes handed to the transport."""
        second = int(self._clock())
        with self._lock:
            dataset = self._dataset(name)
            dataset.rows += count
            dataset.bytes += nbytes
            dataset.history.add(second, count, nbytes)

    def stream_ended(self, name: str, peer: str, error: str | None) -> None:
        """Count the end of a stream; ``error`` is the reason if it ended early."""
        now, host = self._clock(), host_of(peer)
        with self._lock:
            self._dataset(name).active -= 1
            client = self._clients[host]  # a client with a stream is not forgotten
            client.active -= 1
            client.seen = now
        if self._log is not None:
            level = "debug" if error is None else "info"
            more = {} if error is None else {"error": error}
            self._log.often(level, "stream ended", dataset=name, peer=peer, **more)

    def error(self, name: str | None, kind: str) -> None:
        """Count a failed or refused request."""
        with self._lock:
            known = None if name is None else self._datasets.get(name)
            errors = self._errors if known is None else known.errors  # clients may send any name
            errors[kind if kind in errors or len(errors) < _KINDS else "other"] += 1
        if self._log is not None:
            self._log.often("warning", "error", kind=kind, dataset=name)

    # Results.

    def snapshot(self) -> Snapshot:
        """Return all numbers as of now."""
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
        """Forget clients that left a while ago; with `room`, also the oldest half if there are many."""
        if room and len(self._clients) < _CLIENTS:
            return
        idle = sorted((client.seen, host) for host, client in self._clients.items() if not client.active)
        gone = {host for seen, host in idle if seen < now - _REMEMBERED}
        if room:
            gone.update(host for _, host in idle[: (len(idle) + 1) // 2])
        for host in gone:
            del self._clients[host]


def host_of(peer: str) -> str:
    """Return the host of a gRPC peer: ``"ipv4:10.0.0.7:51234"`` -> ``"10.0.0.7"``."""
    family, _, rest = unquote(peer).partition(":")
    if family not in ("ipv4", "ipv6"):
        return peer
    return rest.rpartition(":")[0].strip("[]")
