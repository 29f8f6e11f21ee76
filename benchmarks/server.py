"""The metadata server beside Flask and JSON: rows a second, CPU time of a row, latency, memory and start.

Both serve one file to clients on the same machine, and both are asked in turn for the same rows: pages of a shuffled
epoch, batches of 256 random rows, and single ones; of the latter the next request is sent when the answer is there, or,
with "4 under way" (`Client.batches`), before that. Of ours the client computes the order of the epoch, and requests the
rows of the next pages by number. Ours is ``penstock serve`` with its status page. The peer keeps the
list of lines and the order of the epoch in memory, and answers with lists of lines; connections are kept alive, in both
directions without Nagle's delay. What comes is checked against the file before anything is measured. The client's side
of JSON is a list of str; ours is a record batch, and with "as str" that list as well. "Flight alone" is what a round
trip costs at least: a server that answers every request over the same kind of stream with one batch that it has.

MB/s is what crosses: record batches, or JSON. CPU is microseconds a row, of the client's and of the server's process;
"ratio" is of rates in the same round. With several clients each is a process that asks for one row after the other.
Memory is anonymous memory (``Anonymous`` of smaps_rollup) of the server after all rows of the file were served. "Start"
is from the start of the process to the first row at a client, with the file's index in place and its pages in memory.

    pip install flask
    python benchmarks/server.py --lines 10000000 --repeat 5 --seconds 1
"""

from __future__ import annotations

import argparse
import http.client
import importlib.util
import itertools
import json
import logging
import multiprocessing
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa

from _common import arguments, folder, make_manifest, parse, smaps_rollup, spread, table
from penstock.manifest import Manifest
from penstock.order import make_order
from penstock.server import Client

PAGE = 1 << 14  # rows of a page, for both
BATCH = 256
AHEAD = 4  # requests under way
CLIENTS = 8
CHECKED = 3 * PAGE
SEED = 1

Answers = Iterator[tuple[Any, int]]
"""What came, and its bytes; one answer after the other."""

# ------------------------------------------------------------------------------------------------------------ servers


@dataclass
class Running:
    """A server process."""

    address: str
    process: psutil.Process


@contextmanager
def ours(path: Path) -> Iterator[Running]:
    """``penstock serve``."""
    ready = path.parent / "address"
    command = ["-m", "penstock", "serve", str(path), "--port", "0", "--ready-file", str(ready)]
    command += ["--metrics-port", "0", "--log-level", "warning"]
    with started(command) as process:
        while not ready.exists():
            if process.poll() is not None:
                raise SystemExit(f"penstock serve ended with {process.returncode}")
            time.sleep(0.002)
        yield Running(ready.read_text().strip(), psutil.Process(process.pid))


def peer(path: Path) -> AbstractContextManager[Running]:
    """The peer."""
    return of_this_file("--serve-flask", path)


def alone(path: Path) -> AbstractContextManager[Running]:
    """Flight, and nothing of ours."""
    return of_this_file("--serve-flight", path)


@contextmanager
def of_this_file(option: str, path: Path) -> Iterator[Running]:
    with started([__file__, option, str(path)]) as process:
        assert process.stdout is not None
        yield Running(process.stdout.readline().strip(), psutil.Process(process.pid))


@contextmanager
def started(arguments: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()


def serve_flask(path: str) -> None:
    """Lines and order in lists, as servers of meta files do."""
    import flask
    from werkzeug.serving import WSGIRequestHandler, make_server

    with open(path) as file:
        lines = file.read().splitlines()
    order = make_order("global", len(lines), seed=SEED)[np.arange(len(lines))]
    app = flask.Flask(__name__)

    @app.get("/page/<int:begin>/<int:end>")
    def page(begin: int, end: int) -> Any:
        return flask.jsonify([lines[k] for k in order[begin:end].tolist()])

    @app.post("/rows")
    def rows() -> Any:
        return flask.jsonify([lines[k] for k in flask.request.get_json()])

    @app.get("/row/<int:k>")
    def row(k: int) -> Any:
        return flask.jsonify(lines[k])

    class Handler(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=Handler)
    print(f"127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


def serve_flight(path: str) -> None:
    """The same batch for every request."""
    import pyarrow.flight as flight

    batch = Manifest.open(path).gather(np.arange(BATCH))

    class Same(flight.FlightServerBase):  # type: ignore[misc]
        def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
            writer.begin(batch.schema)
            for _ in reader:
                writer.write_batch(batch)

    server = Same("grpc://127.0.0.1:0")
    print(f"grpc://127.0.0.1:{server.port}", flush=True)
    server.serve()


# ------------------------------------------------------------------------------------------------------------ clients


class Ours:
    """A client of the metadata server; with ``strings`` it makes a list of what comes."""

    def __init__(self, address: str, strings: bool = False, ahead: int = 1) -> None:
        self.client = Client(address)
        self.info = self.client.info()
        self.strings, self.ahead = strings, ahead

    def pages(self) -> Answers:
        """An epoch of one rank, in order."""
        info, order = self.info, make_order("global", self.info.rows, seed=SEED)
        pages = (order[np.arange(begin, min(begin + PAGE, info.rows))] for begin in range(0, info.rows, PAGE))
        yield from map(self._made, self.client.batches(info.name, info.fingerprint, pages, ahead=AHEAD))

    def batches(self, numbers: Iterator[Any]) -> Answers:
        """One answer for each array of row numbers."""
        name, fingerprint = self.info.name, self.info.fingerprint
        if self.ahead > 1:
            yield from map(self._made, self.client.batches(name, fingerprint, numbers, ahead=self.ahead))
        for some in numbers:
            yield self._made(self.client.rows(name, fingerprint, some))

    def _made(self, batch: pa.RecordBatch) -> tuple[Any, int]:
        return strings(batch) if self.strings else batch, batch.nbytes

    def close(self) -> None:
        self.client.close()


class Alone:
    """A client of Flight alone."""

    def __init__(self, address: str) -> None:
        import pyarrow.flight as flight

        self.client = flight.FlightClient(address)
        self.writer, self.reader = self.client.do_exchange(flight.FlightDescriptor.for_command(b""))

    def batches(self, numbers: Iterator[Any]) -> Answers:
        for some in numbers:
            self.writer.write_metadata(pa.py_buffer(some))
            batch = self.reader.read_chunk().data
            yield batch, batch.nbytes

    def close(self) -> None:
        self.writer.close()
        self.client.close()


class Json:
    """A client of the peer."""

    def __init__(self, address: str, single: bool = False) -> None:
        self.connection = http.client.HTTPConnection(address)
        self.single = single

    def pages(self) -> Answers:
        begin = 0
        while True:
            lines, size = self._ask("GET", f"/page/{begin}/{begin + PAGE}")
            if not lines:
                return
            yield lines, size
            begin += PAGE

    def batches(self, numbers: Iterator[Any]) -> Answers:
        for some in numbers:
            if self.single:
                answers = [self._ask("GET", f"/row/{k}") for k in some.tolist()]
                yield [line for line, _ in answers], sum(size for _, size in answers)
            else:
                yield self._ask("POST", "/rows", json.dumps(some.tolist()))

    def _ask(self, method: str, path: str, body: str | None = None) -> tuple[Any, int]:
        headers = {} if body is None else {"Content-Type": "application/json"}
        self.connection.request(method, path, body, headers)
        answer = self.connection.getresponse().read()
        return json.loads(answer), len(answer)

    def close(self) -> None:
        self.connection.close()


def strings(batch: pa.RecordBatch) -> list[str]:
    """The lines of a record batch."""
    lines: list[str] = batch.column(0).cast(pa.large_string()).to_numpy(zero_copy_only=False).tolist()
    return lines


def random_rows(n: int, count: int, seed: int) -> Iterator[Any]:
    """Arrays of random row numbers without end."""
    random = np.random.default_rng(seed)
    while True:
        yield from random.integers(0, n, (1024, count))


# ---------------------------------------------------------------------------------------------------------- measuring


@dataclass
class Round:
    """What one client, or several, got in one round."""

    rate: float
    megabytes: float
    client: float
    server: float
    latencies: Any = None

    def percentile(self, q: float) -> float:
        """Of the latencies, in milliseconds."""
        return float(np.percentile(self.latencies, q)) * 1e3


def measure(answers: Answers, server: psutil.Process, seconds: float) -> Round:
    """Take what comes for some seconds, after a first answer."""
    next(answers)
    rows = size = 0
    other, own, start = cpu_seconds(server), time.process_time(), time.perf_counter()
    for answer, nbytes in answers:
        rows += len(answer)
        size += nbytes
        if time.perf_counter() - start >= seconds:
            break
    took, own, other = time.perf_counter() - start, time.process_time() - own, cpu_seconds(server) - other
    answers.close()  # type: ignore[attr-defined]
    return Round(rows / took, size / took / 1e6, own / rows * 1e6, other / rows * 1e6)


def cpu_seconds(process: psutil.Process) -> float:
    """CPU time of a process that lives, in steps of 10 ms."""
    return sum(process.cpu_times()[:2])


def hammer(task: tuple[str, str, int, int, float]) -> tuple[float, Any, int]:
    """One of several clients: CPU seconds, latencies of its requests for single rows, and bytes."""
    kind, address, n, seed, seconds = task
    with closing(KINDS[kind](address)) as client:
        answers = client.batches(random_rows(n, 1, seed))
        next(answers)
        barrier.wait()
        latencies, size, cpu = [], 0, time.process_time()
        before = start = time.perf_counter()
        for _, nbytes in answers:
            now = time.perf_counter()
            latencies.append(now - before)
            before, size = now, size + nbytes
            if now - start >= seconds:
                break
        return time.process_time() - cpu, np.array(latencies), size


def together(kind: str, server: Running, pool: Any, n: int, seconds: float) -> Round:
    """Single rows for several clients at once."""
    before = cpu_seconds(server.process)
    tasks = [(kind, server.address, n, seed, seconds) for seed in range(CLIENTS)]
    cpu, latencies, sizes = zip(*pool.map(hammer, tasks, chunksize=1), strict=True)
    took = max(own.sum() for own in latencies)
    rows = sum(map(len, latencies))
    other = cpu_seconds(server.process) - before
    return Round(
        rows / took, sum(sizes) / took / 1e6, sum(cpu) / rows * 1e6, other / rows * 1e6, np.concatenate(latencies)
    )


barrier: Any = None


def join(one: Any) -> None:
    """Initialises a process of the pool."""
    global barrier
    barrier = one


KINDS: dict[str, Callable[[str], Any]] = {
    "penstock": Ours,
    "penstock, as str": lambda address: Ours(address, strings=True),
    f"penstock, {AHEAD} under way": lambda address: Ours(address, ahead=AHEAD),
    "Flask": Json,
    "Flask, one by one": lambda address: Json(address, single=True),
    "Flight alone": Alone,
}
PENSTOCK, STRINGS, AT_ONCE, FLASK, FLASK_SINGLE, ALONE = KINDS
SERVERS = {"penstock": ours, "Flask": peer, ALONE: alone}
PAGES, BATCHES, ROWS, ROWS_TOGETHER = (
    "pages, shuffled",
    f"batches of {BATCH}",
    "single rows",
    f"{CLIENTS} clients, rows",
)


def server_of(servers: dict[str, Running], kind: str) -> Running:
    """The server of a kind of client."""
    return servers[kind.split(",")[0]]


def rounds(servers: dict[str, Running], pool: Any, options: argparse.Namespace) -> dict[str, dict[str, list[Round]]]:
    """All rounds, by what was asked for and by client."""
    n = options.lines
    clients = {kind: make(server_of(servers, kind).address) for kind, make in KINDS.items()}
    plan: dict[str, tuple[list[str], Callable[[Any, int], Answers]]] = {
        PAGES: ([PENSTOCK, STRINGS, FLASK], lambda client, k: client.pages()),
        BATCHES: (list(KINDS), lambda client, k: client.batches(random_rows(n, BATCH, k))),
        ROWS: ([PENSTOCK, AT_ONCE, FLASK_SINGLE], lambda client, k: client.batches(random_rows(n, 1, k))),
    }
    found: dict[str, dict[str, list[Round]]] = {what: {kind: [] for kind in kinds} for what, (kinds, _) in plan.items()}
    found[ROWS_TOGETHER] = {PENSTOCK: [], FLASK_SINGLE: []}
    for k in range(options.repeat):
        for what, (kinds, ask) in plan.items():
            for kind in kinds:
                answers = ask(clients[kind], k)
                found[what][kind].append(measure(answers, server_of(servers, kind).process, options.seconds))
        for kind, results in found[ROWS_TOGETHER].items():
            results.append(together(kind, server_of(servers, kind), pool, n, options.seconds))
    for client in clients.values():
        client.close()
    return found


def check(servers: dict[str, Running], path: Path) -> None:
    """The first pages, and some random rows, are those of the file."""
    manifest = Manifest.open(path)
    order = make_order("global", len(manifest), seed=SEED)
    count = min(CHECKED, len(manifest))
    shuffled = texts(manifest.raw(order[np.arange(count)]))
    random = next(random_rows(len(manifest), BATCH, 0))
    for kind in (STRINGS, FLASK):
        with closing(KINDS[kind](server_of(servers, kind).address)) as client:
            pages = itertools.islice(client.pages(), -(-count // PAGE))
            assert [line for page, _ in pages for line in page][:count] == shuffled, f"{kind}: other pages"
            [(batch, _)] = client.batches(iter([random]))
            assert batch == texts(manifest.raw(random)), f"{kind}: other rows"


def texts(raw: Any) -> list[str]:
    return [line.decode() for line in raw.to_pylist()]


def first_answer(serve: Callable[[Path], Any], make: Callable[[str], Any], path: Path) -> float:
    """Seconds from the start of a server to a row at a client."""
    begin = time.perf_counter()
    with serve(path) as server, closing(make(server.address)) as client:
        next(client.batches(iter([np.array([5])])))
        return time.perf_counter() - begin


# ----------------------------------------------------------------------------------------------------------- the table


def throughput(found: dict[str, dict[str, list[Round]]], options: argparse.Namespace) -> None:
    """Print rates and CPU times, and the latencies of several clients."""
    rows: list[Sequence[object]] = []
    for what, kinds in found.items():
        peer = kinds[FLASK if FLASK in kinds else FLASK_SINGLE]
        for kind, results in kinds.items():
            rate = [r.rate / 1e3 for r in results]
            ratio = [r.rate / other.rate for r, other in zip(results, peer, strict=True)]
            costs = [f"{middle(results, name):.3g}" for name in ("megabytes", "client", "server")]
            rows.append((what, kind, *spread(rate, 4), *costs, *spread(ratio, unit="x")))
    header = ["request", "client", "k rows/s: min", "median", "max", "MB/s", "CPU us/row: client", "server"]
    title = f"{options.lines:,} rows, {options.repeat} rounds of {options.seconds} s"
    table(title, [*header, "ratio: min", "median", "max"], rows, peer=FLASK)
    rows = []
    for kind, results in found[ROWS_TOGETHER].items():
        columns = [spread([r.percentile(q) for r in results]) for q in (50, 99, 99.9)]
        rows.append((kind, *itertools.chain(*columns)))
    header = [f"{name}: {part}" for name in ("p50", "p99", "p99.9") for part in ("min", "median", "max")]
    table(f"Latency of single rows with {CLIENTS} clients, ms", ["client", *header], rows, peer=FLASK)


def middle(results: Sequence[Round], name: str) -> float:
    """The median of one attribute."""
    return statistics.median(getattr(r, name) for r in results)


def bars(found: dict[str, dict[str, list[Round]]], start: Sequence[float], memory: float) -> None:
    """Print the medians beside what was to be reached."""
    pages, in_turn, _, together = (kinds[PENSTOCK] for kinds in found.values())
    at_once, single = found[BATCHES][AT_ONCE], found[ROWS][AT_ONCE]
    tails = [r.percentile(99) for r in together]
    rows = [
        row("pages, shuffled", "M rows/s", middle(pages, "rate") / 1e6, 8),
        row("pages, shuffled", "MB/s", middle(pages, "megabytes"), 300),
        row(f"batches of {BATCH}, one after the other", "k rows/s", middle(in_turn, "rate") / 1e3, 800),
        row(f"batches of {BATCH}, {AHEAD} under way", "k rows/s", middle(at_once, "rate") / 1e3, 800),
        row(f"single rows, one client, {AHEAD} under way", "k rows/s", middle(single, "rate") / 1e3, 4.5),
        row(f"single rows, {CLIENTS} clients", "k rows/s", middle(together, "rate") / 1e3, 4),
        row(f"single rows, {CLIENTS} clients, p99", "ms", statistics.median(tails), 5, most=True),
        row("start to first answer", "s", statistics.median(start), 0.5, most=True),
        row("memory after serving all rows", "MB", memory, 150, most=True),
    ]
    table("Bars: medians of penstock", ["what", "unit", "bar", "measured", "verdict"], rows)


def row(what: str, unit: str, value: float, bar: float, *, most: bool = False) -> Sequence[object]:
    """A line of the bars: at least, or at most, so much."""
    met = value < bar if most else value >= bar
    return what, unit, f"{'<' if most else '>='} {bar:g}", f"{value:.4g}", "met" if met else "missed"


def all_rows(servers: dict[str, Running], options: argparse.Namespace) -> dict[str, float]:
    """Ask for every row of the file, and see what memory the servers have then, in MB."""
    with closing(Ours(servers["penstock"].address)) as client:
        assert sum(len(batch) for batch, _ in client.pages()) == options.lines
    return {name: smaps_rollup(servers[name].process.pid)["Anonymous"] / 1e6 for name in ("penstock", "Flask")}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="of one client in a round (default: %(default)s)")
    parser.add_argument("--serve-flask", metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument("--serve-flight", metavar="FILE", help=argparse.SUPPRESS)
    options = parse(parser, {"lines": 100_000, "repeat": 1, "seconds": 0.1}, versions=("flask",))
    if options.serve_flask:
        serve_flask(options.serve_flask)
        return
    if options.serve_flight:
        serve_flight(options.serve_flight)
        return
    if importlib.util.find_spec("flask") is None:
        raise SystemExit("the peer needs flask: pip install flask")
    context = multiprocessing.get_context("spawn")
    with folder(options.dir) as where, ExitStack() as stack:
        path = where / "train.txt"
        make_manifest(path, options.lines, prefix="dataset/set")  # 44 bytes a line
        Manifest.open(path)
        start = {"penstock": [first_answer(ours, Ours, path) for _ in range(2 * options.repeat)]}
        start["Flask"] = [first_answer(peer, Json, path) for _ in range(2)]
        pool = stack.enter_context(context.Pool(CLIENTS, join, [context.Barrier(CLIENTS)]))
        servers = {name: stack.enter_context(serve(path)) for name, serve in SERVERS.items()}
        check(servers, path)
        found = rounds(servers, pool, options)
        memory = all_rows(servers, options)
    throughput(found, options)
    rows = [("start to first answer, s", name, *spread(values)) for name, values in start.items()]
    rows += [("memory, MB", name, "", f"{value:.0f}", "") for name, value in memory.items()]
    table(f"Start and memory, {options.lines:,} rows", ["what", "server", "min", "median", "max"], rows, peer=FLASK)
    bars(found, start["penstock"], memory["penstock"])


if __name__ == "__main__":
    main()
