"""What a plan says that nodes fetch from a store, beside the real order, and beside real nodes and a real store."""

from __future__ import annotations

import itertools
import multiprocessing
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from busy_support import HANG
from full_run import full_only
from store_server import Store

import penstock as ps
from penstock.errors import ConfigError
from penstock.order import make_order
from penstock.shards.writer import ShardWriter
from penstock.storage import Cache, Storage
from penstock.storage.planned_use import NEVER
from penstock.tools.planning.eviction import KnownOrder, LeastRecentlyUsed
from penstock.tools.planning.store import StoreJob, plan_store, uses_of

NODES, EPOCHS = 4, 3


def job(**options: Any) -> StoreJob:
    given = {"samples": np.full(1920, 10), "sizes": np.full(1920, 100), "nodes": 4, "block_size": 10, "window": 2}
    return StoreJob(**{**given, **options})


def test_caches_of_nodes_add_up() -> None:
    for part in (0.0625, 0.125, 0.1875):
        plan = plan_store(job(cache_bytes=int(192_000 * part), epochs=4))
        local, plain, recent = (plan.ways[name] for name in ("by node", "plain", "plain, LRU"))
        assert local[0][:2] == (192_000, 1920)
        assert plain[0].bytes > 700_000
        for epoch in (2, 3):
            # What is fetched ahead takes a sixteenth of a cache, and some are in use.
            assert 4 * part - 0.08 <= local[epoch].hits <= 4 * part
            assert part - 0.03 <= plain[epoch].hits <= part
            assert recent[epoch].hits < plain[epoch].hits


def test_the_last_shards_are_fetched_by_several_nodes() -> None:
    even = plan_store(job(cache_bytes=60_000)).ways["by node"]
    assert even[0].requests == 1920
    # The last shards, fewer than the parts, are cut and dealt to all of them.
    cut = plan_store(job(cache_bytes=60_000, samples=np.full(1950, 10), sizes=np.full(1950, 100))).ways["by node"]
    assert 1950 + 30 <= cut[0].requests <= 1950 + 3 * 30


def test_a_cache_of_a_nodes_rows_hits_all() -> None:
    plan = plan_store(job(cache_bytes=60_000, epochs=4))
    assert [epoch.hits for epoch in plan.ways["by node"]] == [0, 1, 1, 1]


def test_a_global_shuffle_reads_ranges() -> None:
    plan = plan_store(job(cache_bytes=192_000 // 8, epochs=4, shuffle="global"))
    local, plain = plan.ways["by node"][-1], plan.ways["plain"][-1]
    assert local.hits == pytest.approx(0.5, abs=0.02)
    assert plain.hits == pytest.approx(0.125, abs=0.01)
    assert local.bytes == pytest.approx((1 - local.hits) * 192_000, rel=0.02)
    assert plain.requests == pytest.approx((1 - plain.hits) * 1920 * 10, rel=0.02)


def test_all_data_fit() -> None:
    for way in plan_store(job(cache_bytes=300_000, epochs=3)).ways.items():
        name, (first, *later) = way
        assert first.bytes >= 192_000
        # By chance, a plain epoch has no sample of a shard for a node.
        assert all(epoch.bytes <= (0 if name == "by node" else 20_000) for epoch in later)


def test_many_rows_count_as_fewer() -> None:
    """A plan of ten million rows looks at two million, and says the same."""
    few = plan_store(job(samples=np.full(1920, 100), block_size=100, cache_bytes=24_000))
    many = plan_store(job(samples=np.full(1920, 5_000), block_size=5_000, cache_bytes=24_000))
    for name, way in few.ways.items():
        for a, b in zip(way, many.ways[name], strict=True):
            assert b.bytes == pytest.approx(a.bytes, rel=0.03)


def test_uses_are_those_of_the_order() -> None:
    starts = np.cumsum([0, 7, 12, 0, 9, 30, 5])
    order = make_order("block", 63, seed=2, block_size=6, window=2)
    for node in range(2):
        uses = uses_of(order, range(2 * node, 2 * node + 2), 4, starts)
        positions = [p for p in range(64) if p % 4 // 2 == node]
        shards = starts.searchsorted(order[np.array(positions) % 63], "right") - 1
        for shard in range(6):
            at = np.flatnonzero(shards == shard)
            seen = (at[0] // 2, at[-1] // 2, len(at)) if len(at) else (NEVER, -1, 0)
            assert (uses.first[shard], uses.last[shard], uses.rows[shard]) == seen


def test_cost() -> None:
    fetched = plan_store(job(cache_bytes=0, epochs=1)).ways["by node"][0]
    assert fetched.cost(gb_price=0.09, request_price=0.0004) == pytest.approx(
        fetched.bytes / 1e9 * 0.09 + fetched.requests / 1000 * 0.0004
    )


def test_eviction() -> None:
    """With one object in use at a time, what is needed last makes room: as Belady has it."""
    rng, count, held, epochs = np.random.default_rng(0), 300, 75, 5
    orders = [rng.permutation(count) for _ in range(epochs + 1)]
    known, recent = KnownOrder(np.ones(count, np.int64), held), LeastRecentlyUsed(np.ones(count, np.int64), held)
    hits, hits_recent = [], []
    for now, then in itertools.pairwise(orders):
        first, again = np.argsort(now) * 10, count * 10 + np.argsort(then) * 10
        hits.append(1 - len(known.run(first, first + 9, again)) / count)
        hits_recent.append(1 - len(recent.run(now)) / count)
        assert known.has.sum() <= held
    assert 0.22 <= min(hits[1:]) <= max(hits[1:]) <= 0.25
    assert max(hits_recent) < 0.08


def test_refusals() -> None:
    for options, words in (
        ({"nodes": 0}, "nodes must be positive"),
        ({"ranks": 6}, "each node must have equally many ranks"),
        ({"cache_bytes": -1}, "cache_bytes must be 0 or more"),
        ({"shuffle": "none"}, "not 'none'"),
        ({"sizes": np.ones(3, np.int64)}, "a number, 0 or more, for each"),
    ):
        with pytest.raises(ConfigError, match=words):
            plan_store(job(**options))


def _node(node: int, urls: list[str], folder: str, options: dict[str, Any], turn: Any, done: Any) -> None:
    """Train some epochs as the one rank of a node, with a cache of its own."""
    dataset = ps.ShardDataset(
        urls,
        storage=Storage(cache=Cache(folder, max_bytes=options.pop("cache_bytes"))),
        decode=True,
        rank=node,
        world_size=NODES,
        **options,
    )
    loader = ps.DataLoader(dataset, batch_size=1)
    for epoch in range(EPOCHS):
        turn.get(timeout=HANG)
        loader.set_epoch(epoch)
        batches = iter(loader)
        done.put((node, [int(text) for _ in range(len(loader)) for text in next(batches)["txt"]]))
        # With its end an epoch begins to fetch for the next one: those fetches are counted there.
        turn.get(timeout=HANG)
        assert next(batches, None) is None
    loader.close()


def put_shards(folder: Path, shards: int, samples: int) -> tuple[list[str], int]:
    (folder / "data").mkdir()
    with ShardWriter(str(folder / "data" / "s-%03d.tar"), maxcount=samples) as writer:
        for number in range(shards * samples):
            writer.write({"__key__": f"{number:06d}", "bin": os.urandom(10_000), "txt": str(number)})
    ps.ShardSet(str(folder / "data" / "s-*.tar"))  # writes the indexes
    (size,) = {path.stat().st_size for path in folder.glob("data/s-*.tar")}
    return sorted(path.name for path in folder.glob("data/s-*.tar")), size


@full_only("four jobs for each")
@pytest.mark.parametrize(("locality", "shards", "samples"), [("node", 960, 13), ("none", 160, 10)])
def test_real_nodes_fetch_what_is_planned(tmp_path: Path, locality: str, shards: int, samples: int) -> None:
    """Four nodes with caches of an eighth of the data each: bytes of each epoch, within 2 % of the plan."""
    names, size = put_shards(tmp_path, shards, samples)
    order: dict[str, Any] = {"shuffle": "block", "block_size": samples, "seed": 4}
    context = multiprocessing.get_context("spawn")
    turns, done = [context.Queue() for _ in range(NODES)], context.Queue()
    with Store(tmp_path) as store:
        urls = [f"{store.url}/data/{name}" for name in names]
        caches = []
        for node in range(NODES):  # their indexes, beside which there is room for an eighth of the shards
            cache = Cache(tmp_path / f"cache-{node}")
            ps.ShardSet(urls, storage=Storage(cache=cache))
            entries = sum(entry.size for entry in cache.entries())
            caches.append((str(cache.folder), entries + shards // 8 * (size + 600)))
        options = order | ({"locality": "node"} if locality == "node" else {"window": 2})
        jobs = [
            context.Process(
                target=_node, args=(node, urls, folder, {**options, "cache_bytes": limit}, turns[node], done)
            )
            for node, (folder, limit) in enumerate(caches)
        ]
        for one in jobs:
            one.start()
        fetched = []
        store.reset()
        for _ in range(EPOCHS):
            rows: list[int] = []
            for turn in turns:  # one after the other: nobody's look-ahead is late
                turn.put(None)
                rows += done.get(timeout=HANG)[1]
            assert sorted(rows) == list(range(shards * samples))
            found = store.counts()["objects"]
            fetched.append(sum(counts["bytes"] for path, counts in found.items() if path.endswith(".tar")))
            store.reset()
            for turn in turns:
                turn.put(None)
        for one in jobs:
            one.join(HANG)
            assert one.exitcode == 0
    plan = plan_store(
        StoreJob(
            samples=np.full(shards, samples),
            sizes=np.full(shards, size),
            nodes=NODES,
            cache_bytes=shards // 8 * size,
            epochs=EPOCHS,
            window=2,
            **order,
        )
    )
    planned = [epoch.bytes for epoch in plan.ways["by node" if locality == "node" else "plain"]]
    print([b / size for b in fetched], [b / size for b in planned])
    assert fetched == pytest.approx(planned, rel=0.02)
