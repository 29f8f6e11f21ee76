"""Plans beside real runs: what samplers, data sets and loaders do with a manifest of some thousand rows."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from full_run import examples, full_only
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import each_value

import penstock as ps
from penstock.manifest import Manifest
from penstock.order import Partition
from penstock.samplers import BatchSampler, DistributedSampler
from penstock.tools.planning import Job, check_dealing, deal, partition_report


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    path = tmp_path_factory.mktemp("plan") / "train.txt"
    path.write_text("".join(f"{row}.jpg {row // 100}\n" for row in range(3001)))
    return Manifest.open(path)


@pytest.mark.parametrize("remainder", ["pad", "drop", "uneven"])
@pytest.mark.parametrize(("ranks", "batch"), [(1, 64), (4, 64), (7, 10), (8, 500), (13, 231)])
@pytest.mark.parametrize("drop_last", [False, True])
def test_batches_are_those_of_samplers(
    manifest: Manifest, ranks: int, batch: int, remainder: str, drop_last: bool
) -> None:
    planned = deal(
        Job(samples=3001, sample_bytes=1, ranks=ranks, batch_size=batch, remainder=remainder, drop_last=drop_last)
    )
    had: Counter[int] = Counter()
    counts = []
    for rank in range(ranks):
        inner = DistributedSampler(manifest, ranks, rank, "global", seed=1, remainder=remainder)
        batches = list(BatchSampler(inner, batch, drop_last))
        counts.append(len(batches))
        had.update(index for some in batches for index in some)
        if rank == 0:
            assert planned.share == len(inner)
            assert planned.last_batch == (len(batches[-1]) if batches else 0)
    assert (planned.batches, planned.batches_fewest) == (max(counts), min(counts))
    assert planned.dropped + planned.dropped_last - (planned.padded if remainder == "pad" else 0) == 3001 - had.total()
    if not drop_last:
        assert planned.padded == had.total() - len(had)


@pytest.mark.parametrize(("ranks", "mini_epochs"), [(3, 4), (8, 5)])
def test_mini_epochs_are_those_of_rank_dataset_and_loader(manifest: Manifest, ranks: int, mini_epochs: int) -> None:
    job = Job(samples=3001, sample_bytes=1, ranks=ranks, ranks_per_node=2, batch_size=32, mini_epochs=mini_epochs)
    planned = deal(job)
    rows: Counter[int] = Counter()
    here = 0
    for rank in range(ranks):
        data = ps.RankDataset(manifest, rank=rank, world_size=ranks, mini_epochs=mini_epochs, seed=2)
        total = 0
        for mini_epoch in range(mini_epochs):
            data.set_mini_epoch(mini_epoch)
            assert len(data) == planned.share
            batches = len(ps.DataLoader(data, batch_size=32, collate_fn=list))
            assert batches == planned.batches_mini_epoch
            total += batches
            mine = [int(Path(data[k][0]).stem) for k in range(len(data))]
            rows.update(mine)
            here += len(mine) if rank < 2 else 0
        assert total == planned.batches == planned.batches_fewest
    assert planned.padded == rows.total() - 3001
    assert len(rows) == 3001
    assert planned.node_samples == here


@settings(deadline=None, max_examples=examples(75, 300))
@given(
    n=st.integers(1, 400),
    ranks=st.integers(1, 20),
    mini_epochs=st.integers(1, 9),
    batch=st.integers(1, 50),
    remainder=st.sampled_from(["pad", "drop", "uneven"]),
    drop_last=st.booleans(),
)
def test_the_arithmetic_is_that_of_every_partition(
    n: int, ranks: int, mini_epochs: int, batch: int, remainder: str, drop_last: bool
) -> None:
    job = Job(
        samples=n,
        sample_bytes=1,
        ranks=ranks,
        ranks_per_node=4,
        mini_epochs=mini_epochs,
        batch_size=batch,
        remainder=remainder,
        drop_last=drop_last,
    )
    planned = deal(job)
    sizes = [
        [len(Partition(n, ranks, r, mini_epochs=mini_epochs, mini_epoch=m, remainder=remainder)) for r in range(ranks)]
        for m in range(mini_epochs)
    ]
    batches = [[size // batch if drop_last else -(-size // batch) for size in row] for row in sizes]
    of_ranks = [sum(column) for column in zip(*batches, strict=True)]
    assert (planned.batches, planned.batches_fewest) == (max(of_ranks), min(of_ranks))
    total = sum(map(sum, sizes))
    assert n + planned.padded - planned.dropped == total
    trained = sum(min(size, size // batch * batch if drop_last else size) for row in sizes for size in row)
    assert planned.dropped_last == total - trained
    per_rank = [sum(column) for column in zip(*sizes, strict=True)]
    assert planned.node_samples == max(per_rank) * min(4, ranks)
    check = check_dealing(job)
    assert check.ok
    assert check.ranks == ranks


@full_only("many rows for each", but=["block-uneven"])
@pytest.mark.parametrize(("shuffle", "remainder"), each_value(["global", "block", "none"], ["pad", "uneven"]))
def test_spot_checks_at_full_size(shuffle: str, remainder: str) -> None:
    job = Job(
        samples=10**12 + 12_345,
        sample_bytes=10**5,
        ranks=10_000,
        mini_epochs=11,
        shuffle=shuffle,
        remainder=remainder,
    )
    check = check_dealing(job)
    assert check.ok
    assert check.ranks == 10_000
    assert check.samples >= 70_000
    planned = deal(job)
    total = planned.share * 10_000 * 11
    assert remainder == "uneven" or total == job.samples + planned.padded


def test_a_wrong_order_and_a_wrong_partition_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spot checks of code that is wrong on purpose: they must be able to fail."""
    from penstock.order import shuffle

    class Twice(shuffle.Identity):
        def __getitem__(self, index: object) -> object:  # type: ignore[override]
            return super().__getitem__(index) // 2 * 2  # type: ignore[call-overload,operator]

    monkeypatch.setitem(shuffle.SHUFFLES, "twice", lambda n, *_: Twice(n))
    job = Job(samples=10_000, sample_bytes=1, ranks=7, shuffle="twice")
    assert not check_dealing(job).disjoint

    class Shifted(Partition):
        def __init__(self, *arguments: int, **options: object) -> None:
            super().__init__(*arguments, **options)  # type: ignore[arg-type]
            if self.rank == 3:
                self._first += 1

    monkeypatch.setattr(partition_report, "Partition", Shifted)
    check = check_dealing(Job(samples=10_000, sample_bytes=1, ranks=7))
    assert not check.disjoint or not check.complete

    class Short(Partition):
        def __init__(self, *arguments: int, **options: object) -> None:
            super().__init__(*arguments, **options)  # type: ignore[arg-type]
            if self.rank == 3:
                self.length -= 1

    monkeypatch.setattr(partition_report, "Partition", Short)
    check = check_dealing(Job(samples=10_000, sample_bytes=1, ranks=7))
    assert not check.equal
    assert not check.complete


def test_numbers_stay_numbers_at_the_largest_size() -> None:
    planned = deal(Job(samples=2**62, sample_bytes=1, ranks=10_000, batch_size=1024, mini_epochs=3))
    assert planned.share * 30_000 == 2**62 + planned.padded
    assert planned.batches == 3 * -(-planned.share // 1024)
    assert isinstance(planned.node_samples, int)
    assert np.iinfo(np.int64).max > planned.node_samples
