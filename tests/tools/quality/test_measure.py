"""What is measured of an order is what counting by hand gives; samples of it come close to the whole."""

from __future__ import annotations

import itertools
import tracemalloc
from typing import Any

import numpy as np
import pytest
from full_run import examples, full_only
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.order import BlockShuffle, Partition, make_order
from penstock.tools.quality import Quality, ShuffleBuffer, TableOrder, classes_in, measure, runs_in, sorted_labels


def by_hand(orders: list[list[int]], batch: int, ranks: int, labels: list[int]) -> dict[str, float]:
    """All full batches of all epochs, in plain Python."""
    n = len(labels)
    moved, classes, again, overlap = [], [], [], []
    dealt = []
    for _ in orders:
        batches = []
        for rank in range(ranks):
            mine = Partition(n, ranks, rank, remainder="drop").positions().tolist()
            batches += [mine[k : k + batch] for k in range(0, len(mine), batch)]
        dealt.append(batches)
    for epoch, order in enumerate(orders):
        for positions in dealt[epoch]:
            if len(positions) < batch:
                continue
            rows = [order[p] for p in positions]
            moved += [abs(row - p) / n for row, p in zip(rows, positions, strict=True)]
            classes.append(len({labels[row] for row in rows}))
            if epoch + 1 < len(orders):
                sets = [{orders[epoch + 1][p] for p in other} for other in dealt[epoch + 1]]
                pairs = list(itertools.combinations(rows, 2))
                again.append(sum(any({a, b} <= other for other in sets) for a, b in pairs) / max(len(pairs), 1))
                overlap.append(max(max(len(other & set(rows)) for other in sets), 1))
    means = {"displacement": moved, "classes": classes, "pairs_again": again, "overlap": overlap}
    return {name: float(np.mean(values)) for name, values in means.items()}


@settings(deadline=None, max_examples=examples(15, 60))
@given(
    n=st.integers(20, 150),
    batch=st.integers(1, 9),
    ranks=st.integers(1, 3),
    kind=st.sampled_from(["none", "block", "global", "buffer", "table"]),
    classes=st.integers(1, 20),
)
def test_it_is_what_counting_gives(n: int, batch: int, ranks: int, kind: str, classes: int) -> None:
    def make(epoch: int) -> Any:
        if kind == "buffer":
            return ShuffleBuffer(n, 7, epoch)
        if kind == "table":
            return TableOrder(np.random.default_rng(epoch).permutation(n))
        return make_order(kind, n, epoch=epoch, block_size=6, window=3)

    if n // ranks < batch:
        return
    found = measure(
        make, batch_size=batch, ranks=ranks, epochs=3, labels=sorted_labels(n, classes), batches=None, window=18
    )
    labels = [row * classes // n for row in range(n)]
    # What is left over is in no full batch: its positions have numbers of their own, so they may pair up, too.
    expected = by_hand([make(epoch)[np.arange(n)].tolist() for epoch in range(3)], batch, ranks, labels)
    if (n // ranks) % batch == 0 and n % ranks == 0:
        assert found.pairs_again == pytest.approx(expected["pairs_again"])
        assert found.overlap == pytest.approx(expected["overlap"])
    assert found.displacement == pytest.approx(expected["displacement"])
    assert found.classes == pytest.approx(expected["classes"])


def test_a_sample_comes_close_to_the_whole() -> None:
    n = 400_000
    labels = sorted_labels(n, 1000)

    def both(make: Any) -> tuple[Quality, Quality]:
        whole = measure(make, batch_size=200, labels=labels, batches=None, windows=None)
        return whole, measure(make, batch_size=200, labels=labels, batches=200, windows=3)

    for kind in ("global", "block"):
        whole, some = both(lambda epoch, kind=kind: make_order(kind, n, epoch=epoch))
        assert (whole.batches, some.batches) == (2000, 200)
        assert some.displacement == pytest.approx(whole.displacement, abs=0.015)
        assert some.classes == pytest.approx(whole.classes, rel=0.05)
        assert some.pairs_again == pytest.approx(whole.pairs_again, rel=0.25)
        assert some.runs == pytest.approx(whole.runs, rel=0.05)


def test_a_random_order_is_what_is_expected_of_one() -> None:
    labels = sorted_labels(500_000, 1000)
    found = measure(lambda epoch: make_order("global", 500_000, epoch=epoch), batch_size=256, labels=labels)
    assert found.displacement == pytest.approx(1 / 3, abs=0.01)
    assert found.classes == pytest.approx(1000 * (1 - (1 - 1 / 1000) ** 256), abs=1.5)
    assert found.classes == pytest.approx(found.classes_random, abs=2)
    assert found.pairs_again == pytest.approx(found.pairs_random, rel=0.1)
    assert found.overlap == pytest.approx(found.overlap_random, abs=0.2)


def test_the_order_of_the_file_repeats_itself() -> None:
    found = measure(lambda epoch: make_order("none", 10_000), batch_size=100)
    assert (found.displacement, found.pairs_again, found.overlap, found.runs) == (0, 1, 100, 1)
    assert found.rows_a_run == 5_000
    assert found.classes is None is found.classes_random is found.commonest


@pytest.mark.parametrize(("kind", "longest"), [("none", 3000), ("global", 2.5)])
def test_runs_of_an_epoch_that_is_shorter_than_a_window(kind: str, longest: float) -> None:
    found = measure(lambda epoch: make_order(kind, 6000, epoch=epoch), batch_size=60)
    assert (found.streams, found.window) == (False, 3000)
    assert longest / 2 < found.rows_a_run <= longest


def test_windows_of_a_block_shuffle_are_its_own() -> None:
    """A short block moves them; looked at elsewhere a window would be cut in two."""
    n, window = 100_001, 16 * 64
    found = measure(
        lambda epoch: BlockShuffle(n, 3, block_size=64, window=16), batch_size=64, window=window, windows=None
    )
    assert found.window == window
    assert 15 < found.runs < 16.3


def test_ten_to_the_twelve_and_ten_thousand_ranks() -> None:
    n = 10**12
    for kind in ("block", "global"):
        found = measure(
            lambda epoch, kind=kind: make_order(kind, n, epoch=epoch),
            batch_size=64,
            ranks=10_000,
            epochs=1,
            batches=64,
            windows=1,
        )
        assert found.displacement == pytest.approx(1 / 3, abs=0.03)
        assert found.pairs_again is None is found.overlap


@full_only("much memory")
def test_memory_does_not_grow_with_the_window() -> None:
    n = 10**10
    tracemalloc.start()
    try:
        order = make_order("block", n, block_size=10**6, window=1000)
        found = measure(lambda epoch: order, batch_size=8, batches=4, epochs=1, window=10**9, windows=1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.window == 1 << 22
    assert peak < 600e6


def test_small_parts() -> None:
    assert runs_in(np.array([9, 1, 2, 8, 3])) == 2
    assert classes_in(np.array(["a", "b", "a"], object)) == (2, 2)
    assert sorted_labels(10, 3)(np.arange(10)).tolist() == [0, 0, 0, 0, 1, 1, 1, 2, 2, 2]
    far = sorted_labels(10**17, 10_000)(np.array([0, 10**17 - 1]))
    assert far.tolist() == [0, 9999]
    seen: list[tuple[int, int]] = []
    order = make_order("none", 100)
    measure(lambda epoch: order, batch_size=10, progress=lambda done, todo: seen.append((done, todo)))
    assert seen[-1] == (20, 20)


def test_what_makes_no_sense() -> None:
    order = make_order("none", 100)
    with pytest.raises(ConfigError, match="smaller batches or fewer ranks"):
        measure(lambda epoch: order, batch_size=60, ranks=2)
    for arguments in ({"epochs": 0}, {"window": 0}, {"batches": 0}, {"ranks": 0}):
        with pytest.raises(ConfigError, match="positive"):
            measure(lambda epoch: order, **{"batch_size": 5, **arguments})
