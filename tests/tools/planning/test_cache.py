"""Hit rates beside a least-recently-used cache of bytes that the real order and partition run through."""

from __future__ import annotations

import itertools
from collections import OrderedDict

import numpy as np
import pytest
from full_run import examples, full_only
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import pairwise

from penstock.order import Partition, make_order
from penstock.tools.planning import Job, hit_rates
from penstock.tools.planning.cache import _touched

N = 12_000


def simulate(job: Job, sizes: np.ndarray, seed: int) -> list[float]:
    """The first node's reads, batch by batch as its ranks make them, through a cache of bytes."""
    cache: OrderedDict[int, int] = OrderedDict()
    used = 0
    units = np.add.reduceat(sizes, np.arange(0, job.samples, job.read_rows))
    rates = []
    for epoch in range(job.epochs):
        order = make_order(
            job.shuffle, job.samples, seed=seed, epoch=epoch, block_size=job.block_size, window=job.window
        )
        parts = [Partition(job.samples, job.ranks, rank) for rank in range(job.ranks_here)]
        hits = reads = 0
        for begin in range(0, len(parts[0]), job.batch_size):
            for part in parts:
                for row in order[part.positions(begin, begin + job.batch_size) % job.samples].tolist():
                    unit = row // job.read_rows
                    reads += 1
                    if unit in cache:
                        hits += 1
                        cache.move_to_end(unit)
                        continue
                    cache[unit] = int(units[unit])
                    used += cache[unit]
                    while used > job.cache_bytes:
                        used -= cache.popitem(last=False)[1]
        rates.append(hits / reads)
    return rates


@full_only("counts every read for each", but=["global-4-4-0.45", "block-4-20-0.1"])
@pytest.mark.parametrize(
    ("shuffle", "ranks", "read_rows", "part"),
    pairwise(["global", "block", "none"], [2, 4, 16], [1, 4, 20], [0.1, 0.45, 0.9]),
)
def test_it_is_what_a_cache_does(shuffle: str, ranks: int, read_rows: int, part: float) -> None:
    sizes = np.random.default_rng(0).integers(50, 151, N)  # of different samples: their mean counts
    job = Job(
        samples=N,
        sample_bytes=round(float(sizes.mean())),
        cache_bytes=round(part * float(sizes.sum())),
        ranks=ranks,
        ranks_per_node=2,
        batch_size=16,
        shuffle=shuffle,
        block_size=20,
        window=5,
        read_rows=read_rows,
        epochs=4,
    )
    found = np.mean([simulate(job, sizes, seed) for seed in range(2)], axis=0)
    assert hit_rates(job) == pytest.approx(found, abs=0.03)


@settings(deadline=None, max_examples=examples(75, 300))
@given(r=st.integers(1, 60), here=st.integers(1, 12), ranks=st.integers(1, 40))
def test_units_that_a_node_touches_in_the_order_of_the_file(r: int, here: int, ranks: int) -> None:
    here = min(here, ranks)
    rows = np.arange(r * ranks)
    touched = np.unique(rows[rows % ranks < here] // r)
    assert _touched(r, here, ranks) == pytest.approx(len(touched) / ranks)


def test_closed_forms() -> None:
    for c in (0.1, 0.5, 0.8):
        job = Job(samples=10**6, sample_bytes=1000, cache_bytes=round(c * 10**9), epochs=2)
        assert hit_rates(job)[1] == pytest.approx(c + (1 - c) * np.log(1 - c), abs=1e-3)
        many = Job(samples=10**6, sample_bytes=1000, cache_bytes=round(c * 10**9), ranks=8000, epochs=20_000)
        assert hit_rates(many)[-1] == pytest.approx(c, abs=2e-3)  # another random thousandth each time


@settings(deadline=None, max_examples=examples(50, 200))
@given(
    samples=st.integers(1, 10**15),
    part=st.floats(0, 1.5),
    ranks=st.integers(1, 10_000),
    here=st.integers(1, 16),
    read_rows=st.integers(1, 1024),
    window=st.integers(1, 256),
)
def test_shares_are_shares_and_more_cache_is_not_worse(
    samples: int, part: float, ranks: int, here: int, read_rows: int, window: int
) -> None:
    for shuffle in ("none", "block", "global"):
        rates = []
        for cache in (0, round(part * samples * 100) // 2, round(part * samples * 100), samples * 100):
            job = Job(
                samples=samples,
                sample_bytes=100,
                cache_bytes=cache,
                ranks=ranks,
                ranks_per_node=here,
                read_rows=read_rows,
                shuffle=shuffle,
                window=window,
            )
            rates.append(hit_rates(job))
        assert all(0 <= rate <= 1 for some in rates for rate in some)
        for some in zip(*rates[:3], strict=True):
            assert all(a <= b + 1e-6 for a, b in itertools.pairwise(some)), (shuffle, rates)
        assert rates[-1][-1] >= rates[-1][0] - 1e-9
        if read_rows == 1:
            assert rates[-1][0] == pytest.approx(0, abs=1e-9)
