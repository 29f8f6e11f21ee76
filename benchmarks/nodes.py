"""Several nodes with small caches over one store: what they fetch, dealt anew in each epoch or by node.

Four processes stand for nodes of one rank each, with a cache of an eighth of the data each, before a store on 127.0.0.1
(tests/support/store_server.py), which counts. They go through some epochs, all at the same time. Beside what they fetch
stands what `penstock plan --shards` says beforehand. Hits are the shards of an epoch that a node did not have to fetch.

    python benchmarks/nodes.py
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from store_server import Store

import penstock as ps
from _common import arguments, folder, parse, table
from penstock.shards.writer import ShardWriter
from penstock.storage import Cache, Storage
from penstock.tools.planning.store import Fetched, StoreJob, plan_store

NODES, PART = 4, 8
_ORDER = {"shuffle": "block", "seed": 0}
_WAYS = {"plain": {"window": 2}, "by node": {"locality": "node"}}


class Epoch(NamedTuple):
    """What all nodes fetched of shards, how many they needed, and the time by the clock."""

    bytes: int
    requests: int
    needed: int
    seconds: float


def write_shards(where: Path, shards: int, samples: int, size: int) -> tuple[list[str], int]:
    """Write shards and their indexes; return their names and the size of each."""
    where.mkdir()
    random = np.random.default_rng(0)
    with ShardWriter(str(where / "s-%05d.tar"), maxcount=samples) as writer:
        for number in range(shards * samples):
            writer.write({"__key__": f"{number:08d}", "bin": random.bytes(size)})
    ps.ShardSet(str(where / "s-*.tar"))
    paths = sorted(where.glob("s-*.tar"))
    return [path.name for path in paths], paths[0].stat().st_size


def node(number: int, urls: list[str], cache: Path, limit: int, samples: int, way: str, turn: Any, done: Any) -> None:
    """Be a node: go through an epoch for each word, and say how many shards that needed."""
    dataset = ps.ShardDataset(
        urls,
        storage=Storage(cache=Cache(cache, max_bytes=limit)),
        rank=number,
        world_size=NODES,
        block_size=samples,
        **_ORDER,
        **_WAYS[way],
    )
    loader = ps.DataLoader(dataset, batch_size=8)
    done.put(0)
    while (epoch := turn.get()) is not None:
        loader.set_epoch(epoch)
        done.put(len({int(key) // samples for batch in loader for key in batch["__key__"]}))
    loader.close()


def measure(where: Path, urls: list[str], store: Store, size: int, samples: int, way: str, epochs: int) -> list[Epoch]:
    """Run some epochs on all nodes, with empty caches at first."""
    context = multiprocessing.get_context("spawn")
    turns, done = [context.Queue() for _ in range(NODES)], context.Queue()
    jobs = []
    for number, turn in enumerate(turns):
        cache = Cache(where / f"{way}-{number}")
        ps.ShardSet(urls, storage=Storage(cache=cache))  # the indexes lie there beside the shards
        limit = sum(entry.size for entry in cache.entries()) + len(urls) // PART * (size + 600)
        given = (number, urls, cache.folder, limit, samples, way, turn, done)
        jobs.append(context.Process(target=node, args=given))
    for job in jobs:
        job.start()
    for _ in jobs:
        done.get(timeout=300)
    found = []
    for epoch in range(epochs):
        store.reset()
        begin = time.perf_counter()
        for turn in turns:
            turn.put(epoch)
        needed = sum(done.get(timeout=1800) for _ in turns)
        seconds = time.perf_counter() - begin
        objects = [counts for path, counts in store.counts()["objects"].items() if path.endswith(".tar")]
        fetched = [sum(counts[name] for counts in objects) for name in ("bytes", "GET")]
        found.append(Epoch(*fetched, needed, seconds))
    for turn in turns:
        turn.put(None)
    for job in jobs:
        job.join()
    return found


def row(way: str, number: int, epoch: Epoch, planned: Fetched, data: int, shards: int) -> list[object]:
    return [
        way,
        number + 1,
        f"{epoch.bytes / data:.2f}",
        f"{planned.bytes / data:.2f}",
        f"{epoch.requests:,}",
        f"{1 - epoch.bytes * shards / data / epoch.needed:.1%}",
        f"{planned.hits:.1%}",
        f"{epoch.seconds:.1f}",
    ]


def main() -> None:
    """Measure both ways of dealing."""
    parser = arguments(__doc__)
    parser.add_argument("--shards", type=int, default=960)
    parser.add_argument("--samples", type=int, default=13, help="of a shard (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=4)
    options = parse(parser, {"shards": 64, "samples": 16, "epochs": 2})
    rows: list[list[object]] = []
    with folder(options.dir) as where:
        names, size = write_shards(where / "data", options.shards, options.samples, 4_000)
        data = size * options.shards
        with Store(where) as store:
            urls = [f"{store.url}/data/{name}" for name in names]
            job = StoreJob(
                samples=np.full(options.shards, options.samples),
                sizes=np.full(options.shards, size),
                nodes=NODES,
                cache_bytes=options.shards // PART * size,
                epochs=options.epochs,
                block_size=options.samples,
                window=2,
                **_ORDER,
            )
            planned = plan_store(job).ways
            for way in _WAYS:
                found = measure(where, urls, store, size, options.samples, way, options.epochs)
                rows += [
                    row(way, number, epoch, said, data, options.shards)
                    for number, (epoch, said) in enumerate(zip(found, planned[way], strict=True))
                ]
    columns = ["dealing", "epoch", "fetched, x data", "planned", "GETs", "hits", "planned hits", "s"]
    title = (
        f"{NODES} nodes with a cache of 1/{PART} of the data each, {options.shards:,} shards of {size / 1e3:,.0f} kB, "
        "blocks of a shard, plain in windows of 2"
    )
    table(title, columns, rows)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
