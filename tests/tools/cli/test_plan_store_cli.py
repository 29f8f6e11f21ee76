"""``penstock plan --shards``: what it prints is what `penstock.tools.planning.store` computes."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_support import refusal, said

from penstock.errors import ConfigError
from penstock.shards.writer import ShardWriter
from penstock.tools.planning.store import StoreJob, plan_store

invoke = functools.partial(said, "plan")

ORDER = ("--shuffle", "block", "--block-size", 20, "--window", 4, "--seed", 3)
SMALL = ("--shards", 1000, "--samples", 20_000, "--bytes", "1kB", "--nodes", 2, "--cache", "6MB", *ORDER)
PRICES = ("--gb-price", 0.09, "--request-price", 0.4)


def planned(samples: Any, sizes: Any, **options: Any) -> dict[str, Any]:
    job = StoreJob(
        samples=samples,
        sizes=sizes,
        nodes=2,
        cache_bytes=6_000_000,
        shuffle="block",
        block_size=20,
        window=4,
        seed=3,
        **options,
    )
    ways = plan_store(job).ways.items()
    return {
        name: [{**e._asdict(), "cost": e.cost(gb_price=0.09, request_price=0.4)} for e in way] for name, way in ways
    }


def test_json_is_the_plan() -> None:
    report = json.loads(invoke(*SMALL, *PRICES, "--ranks", 4, "--epochs", 4, "--json"))["store"]
    bounds = np.arange(1001) * 20_000 // 1000
    assert report["ways"] == planned(np.diff(bounds), np.diff(bounds) * 1000, ranks=4, epochs=4)
    del report["ways"]
    assert report == {
        "shards": 1000,
        "samples": 20_000,
        "bytes": 20_000_000,
        "nodes": 2,
        "ranks": 4,
        "cache_bytes": 6_000_000,
        "gb_price": 0.09,
        "request_price": 0.4,
        "shuffle": "block",
        "block_size": 20,
        "window": 4,
        "seed": 3,
    }


def test_the_table() -> None:
    text = invoke(*SMALL, *PRICES)
    assert "1,000 shards with 20,000 samples (20 MB), 2 ranks on 2 nodes, a cache of 6 MB each, block shuffle" in text
    assert re.search(r"plain, LRU +1 +40 MB +2,000 +0\.0%", text)
    assert re.search(r"by node +1 +2\d\.\d MB +1,\d{3} +0\.0% +0\.\d\d", text)
    assert re.search(r"2 to 3, each", text)
    assert "cost" not in invoke(*SMALL)


def test_shards_that_are_there(tmp_path: Path) -> None:
    sizes = []
    for number, samples in enumerate([30, 50, 40]):
        with ShardWriter(str(tmp_path / f"s-{number}-%d.tar"), maxcount=100) as writer:
            for key in range(samples):
                writer.write({"__key__": f"{number}-{key}", "bin": bytes(700)})
    sizes = [path.stat().st_size for path in sorted(tmp_path.glob("s-*.tar"))]
    report = json.loads(
        invoke("--shards", tmp_path / "s-*.tar", "--nodes", 2, "--cache", "6MB", *ORDER, *PRICES, "--json")
    )
    assert report["store"]["ways"] == planned(np.array([30, 50, 40]), np.array(sizes))
    (tmp_path / "rows.csv").write_text("path,label\na.jpg,1\n")
    with pytest.raises(ConfigError, match=r"rows.csv has neither tar shards nor MDS shards"):
        invoke("--shards", tmp_path / "rows.csv")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--nodes", 2), "need --shards"),
        (("--shards", 10), "add --samples N and --bytes SIZE"),
        (("--shards", 10, "--samples", 5, "--bytes", 1), "1 shard or more"),
        (("--shards", "x.tar", "--samples", 5), "the shards define them"),
        ((*SMALL, "--ranks", 3), "each node must have equally many ranks"),
        ((*SMALL, "--step-ms", 3), "--step-ms: a plan with --shards does not use them"),
        ((*SMALL, "--source", "web=10"), "leave other data out"),
        (("--shards", 10, "--samples", 50, "--bytes", 1, "--shuffle", "none"), "not 'none'"),
    ],
)
def test_refusals(options: Any, words: str) -> None:
    assert words in refusal("plan", *options)
