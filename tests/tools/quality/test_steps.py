"""`measure_steps` finds what is mixed and what is not, through filters, mixtures and packs; its counts are exact."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from packed_support import Documents

from penstock import ArrayDataset, DataLoader, DistributedSampler, Ledger, Mixture, PackedDataset, Subset
from penstock.errors import ConfigError
from penstock.samplers.lengths import lengths_of
from penstock.tools.quality.packs import pack_spread
from penstock.tools.quality.shares import measure_shares
from penstock.tools.quality.steps import SourceSpread, measure_steps

LENGTHS = np.maximum(np.random.default_rng(0).lognormal(4.0, 1.0, 20_000).astype(np.int64), 1)
MASK = (np.arange(20_000) % 3 > 0) & (np.arange(20_000) < 10_000)


@pytest.fixture(scope="module")
def arrays(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("steps") / "data.npy"
    np.save(path, np.zeros((20_000, 1), np.float32))
    return path


def filtered(path: Path, **order: str) -> Subset:
    return Subset(ArrayDataset(path, rank=0, world_size=1, **order), MASK)


def only(dataset: object, batch_size: int = 16, **how: int) -> SourceSpread:
    (found,) = measure_steps(DataLoader(dataset, batch_size=batch_size), **how).sources  # type: ignore[arg-type]
    return found


def test_a_filter_is_seen_as_rows_of_the_file(arrays: Path) -> None:
    loader = DataLoader(filtered(arrays), batch_size=16)
    found = only(filtered(arrays), epochs=1, ranks=2, steps=5)
    assert (found.rows, found.kept, found.looked_at) == (20_000, MASK.sum(), 5 * 32)
    ledger = Ledger(loader, world_size=2)
    steps = [ledger.rows(k * ledger.steps_per_epoch // 5) for k in range(5)]
    gaps = np.concatenate([np.abs(np.diff(step.rows)) / 20_000 for step in steps])
    assert found.distance == pytest.approx(gaps.mean())
    places = np.cumsum(MASK) - 1
    neighbours = sum(int((np.diff(np.sort(places[step.rows])) == 1).sum()) for step in steps)
    assert found.neighbours == pytest.approx(neighbours / 160)
    rows, positions = (np.concatenate([getattr(step, name) for step in steps]) for name in ("rows", "positions"))
    assert found.correlation == pytest.approx(np.corrcoef(rows, positions)[0, 1])
    # Kept is the first half of the file, so rows at random are half as far from each other.
    assert found.distance_random == pytest.approx(1 / 6, rel=0.02)


def test_good_orders_and_bad_ones(arrays: Path) -> None:
    mixed, plain = only(filtered(arrays)), only(filtered(arrays, shuffle="none"))
    assert mixed.distance == pytest.approx(mixed.distance_random, rel=0.05)
    assert abs(mixed.correlation) < 4 * mixed.correlation_random
    assert mixed.neighbours == pytest.approx(mixed.neighbours_random, abs=0.002)
    assert plain.distance < 0.001
    assert plain.correlation > 0.999
    assert plain.neighbours == pytest.approx(15 / 16)


def test_a_filter_under_a_sampler_is_the_same() -> None:
    data = Subset(range(20_000), MASK)
    sampler = DistributedSampler(range(len(data)), num_replicas=2, rank=0, seed=0, shuffle="global")
    (found,) = measure_steps(DataLoader(data, batch_size=16, sampler=sampler)).sources
    assert (found.rows, found.kept) == (20_000, MASK.sum())
    assert found.distance == pytest.approx(1 / 6, rel=0.05)


@pytest.mark.parametrize("shuffle", ["none", "global"])
def test_sources_of_a_mixture(shuffle: str) -> None:
    sources = [(range(9000), 0.7), (Subset(range(20_000), MASK), 0.2), (range(500), 0.1)]
    schedule = [(5000, [0.3, 0.3, 0.4])]
    data = Mixture(sources, stop=20_000, schedule=schedule, shuffle=shuffle, rank=0, world_size=1)
    found = measure_steps(DataLoader(data, batch_size=32), ranks=4)
    assert [source.rows for source in found.sources] == [9000, 20_000, 500]
    for source in found.sources:
        close = source.distance == pytest.approx(source.distance_random, rel=0.05)
        assert close == (shuffle == "global")
    assert found.shares is not None
    assert found.shares.worst < 4
    assert (found.shares.ranks, found.shares.window) == (4, 5000)


def test_aliasing_is_found() -> None:
    """The defect of interleavings that are periodic: the job has the right shares, and a rank one source alone."""
    found = measure_shares(lambda at: at % 2, [[0.5, 0.5]], 100_000, ranks=2)
    assert found is not None
    assert found.worst == pytest.approx(np.sqrt(10_000))
    assert (found.share, found.expected) in [(1.0, 0.5), (0.0, 0.5)]
    assert found.worst > 20 * found.worst_random
    fair = measure_shares(lambda at: np.random.default_rng(0).integers(0, 2, len(at)), [[0.5, 0.5]], 100_000, ranks=2)
    assert fair is not None
    assert fair.worst < 4


def test_shares_go_by_the_stage_of_each_position() -> None:
    sources, stages = (lambda at: (at >= 500).astype(np.int64) for _ in range(2))
    found = measure_shares(sources, [[1, 0], [0, 1]], 1000, stages=stages, window=1000)
    assert found is None  # without chance there is no deviation
    wrong = measure_shares(sources, [[0.5, 0.5], [0.1, 0.9]], 1000, stages=stages, window=1000, windows=1)
    assert wrong is not None
    assert wrong.expected == pytest.approx(0.3 if wrong.source == 0 else 0.7)
    assert wrong.worst == pytest.approx(200 / np.sqrt(500 * 0.25 + 500 * 0.09))
    assert measure_shares(lambda at: at * 0, [[0.999, 0.001]], 1000, window=100) is None  # too few of the rare one


@pytest.mark.parametrize("order", ["global", "block"])
def test_packs(order: str) -> None:
    how = {"order": order, "block_size": 2000} if order == "block" else {}
    data = PackedDataset(Documents(LENGTHS), 512, lengths=LENGTHS, rank=0, world_size=1, **how)  # type: ignore[arg-type]
    found = only(data, batch_size=8, ranks=2)
    assert (found.rows, found.kept) == (20_000, 20_000)
    assert (found.distance > 0.3) == (order == "global")
    assert found.packs is not None
    assert found.packs.documents == pytest.approx(data.density, rel=0.03)
    assert found.packs.spread < found.packs.spread_random
    some = PackedDataset(Subset(Documents(LENGTHS), MASK), 512, lengths=LENGTHS[MASK], rank=0, world_size=1)
    assert only(some, batch_size=8).distance == pytest.approx(1 / 6, rel=0.05)


def test_packs_of_one_length_only_are_found() -> None:
    """Batches of short documents and others of long ones: what packing by length would do."""
    batches = np.repeat(np.arange(100), 20)
    sorted_lengths = np.sort(LENGTHS)[:: len(LENGTHS) // 2000][:2000]
    found = pack_spread(lengths_of(LENGTHS), 512, batches, sorted_lengths, np.full(100, 3))
    assert found is not None
    assert found.spread > 2 * found.spread_random
    means = sorted_lengths / -(-sorted_lengths // 512)
    by_hand = means.reshape(100, 20).mean(axis=1)
    assert found.spread == pytest.approx(by_hand.std() / by_hand.mean())
    assert found.documents == pytest.approx(20 / 3)


@pytest.mark.parametrize(("low", "high", "documents"), [(300, 500, 1), (180, 256, 2)])
def test_packs_at_random(low: int, high: int, documents: int) -> None:
    """Where each pack has so many documents, a batch has three times as many independent ones."""
    lengths = np.random.default_rng(0).integers(low, high, 20_000)
    batches = np.repeat(np.arange(500), 3 * documents)
    found = pack_spread(lengths_of(lengths), 512, batches, lengths[: len(batches)], np.full(500, 3))
    assert found is not None
    alone = lengths.std() / lengths.mean()
    assert found.spread_random == pytest.approx(alone / np.sqrt(3 * documents), rel=0.1)
    assert found.spread == pytest.approx(found.spread_random, rel=0.15)


def test_packs_in_a_mixture() -> None:
    packs = [PackedDataset(Documents(LENGTHS), 512, lengths=LENGTHS, seed=k, rank=0, world_size=1) for k in range(2)]
    mixture = Mixture([(packs[0], 0.6), (packs[1], 0.4)], stop=2000, rank=0, world_size=1)
    found = measure_steps(DataLoader(mixture, batch_size=8))
    for source in found.sources:
        assert source.distance == pytest.approx(1 / 3, rel=0.05)
        assert source.packs is not None
        assert source.packs.documents == pytest.approx(packs[0].density, rel=0.05)


def test_what_makes_no_sense(arrays: Path) -> None:
    loader = DataLoader(filtered(arrays), batch_size=16)
    for arguments in ({"epochs": 0}, {"steps": 0}, {"window": 0}, {"ranks": 0}):
        with pytest.raises(ConfigError, match=f"{next(iter(arguments))} must be positive"):
            measure_steps(loader, **arguments)
    with pytest.raises(ConfigError, match="has no step"):
        measure_steps(DataLoader(filtered(arrays), batch_size=100_000, drop_last=True))
    with pytest.raises(ConfigError, match="each rank needs a position"):
        measure_shares(lambda at: at, [[1.0]], 3, ranks=4)
