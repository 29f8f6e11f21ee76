"""`data_plan`: its figures are those of a run that is carried out, step by step."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_support import Documents

from penstock import ArrayDataset, DataLoader, DistributedSampler, Ledger, Mixture, PackedDataset, Subset
from penstock.errors import ConfigError
from penstock.tools.planning.data import DataPlan, data_plan

NAMES = ["web", "books", "code"]
SIZES = (900, 400, 50)
SCHEDULE = [(0, [1, 0, 0]), (300, [1, 1, 0]), (1500, [0.2, 0.3, 0.5])]


def mixture(**options: Any) -> Mixture:
    made = {"schedule": SCHEDULE, "stop": 1000, "names": NAMES, "rank": 0, "world_size": 1} | options
    return Mixture([range(size) for size in SIZES], **made)


def carried_out(loader: DataLoader[Any], plan: DataPlan) -> list[tuple[int, int, int, int]]:
    """Return step, position of the job, source and row of all samples, in the order of positions."""
    ledger = Ledger(loader, world_size=plan.ranks)
    found = []
    for step in range(plan.epochs * plan.steps_per_epoch):
        rows = ledger.rows(step)
        places = rows.positions + rows.epoch * plan.samples
        found += [
            (step, *sample) for sample in zip(places.tolist(), rows.sources.tolist(), rows.rows.tolist(), strict=True)
        ]
    return sorted(found, key=lambda sample: sample[1])


@settings(max_examples=15, deadline=None)
@given(
    begins=st.lists(st.integers(1, 600), min_size=2, max_size=2, unique=True).map(sorted),
    weights=st.lists(st.lists(st.integers(0, 5), min_size=3, max_size=3).filter(any), min_size=3, max_size=3),
    stop=st.integers(20, 300),
    epochs=st.integers(1, 3),
    batch=st.integers(2, 9),
    ranks=st.integers(1, 3),
    mini_epochs=st.integers(1, 2),
)
def test_a_plan_is_the_run(
    begins: list[int], weights: list[list[int]], stop: int, epochs: int, batch: int, ranks: int, mini_epochs: int
) -> None:
    schedule = list(zip([0, *begins], weights, strict=True))
    data = mixture(schedule=schedule, stop=stop, mini_epochs=mini_epochs, remainder="uneven")
    loader = DataLoader(data, batch_size=batch)
    plan = data_plan(loader, epochs=epochs, ranks=ranks)
    run = carried_out(loader, plan)
    assert len(run) == epochs * stop
    for number, source in enumerate(plan.sources):
        mine = [sample for sample in run if sample[2] == number]
        assert source.had == len(mine)
        assert source.passes == len(mine) / SIZES[number]
        assert source.never == SIZES[number] - len({row for *_, row in mine})
        again = mine[SIZES[number]] if len(mine) > SIZES[number] else None
        assert source.again == (None if again is None else again[1])
        assert source.again_step == (None if again is None else again[0])
        counts = [sum(stage.begin <= place < stage.end for _, place, *_ in mine) for stage in plan.stages]
        assert list(source.by_stage) == counts
    for stage in plan.stages:
        assert stage.step == run[stage.begin][0]
    steps = itertools.pairwise([*plan.steps, epochs * plan.steps_per_epoch])
    for (begin, end), shares in zip(steps, plan.curve, strict=True):
        had = Counter(source for step, _, source, _ in run if begin <= step < end)
        assert shares == pytest.approx([had[number] / had.total() for number in range(3)])


def test_what_no_step_of_the_run_has() -> None:
    schedule = [(0, [2, 1, 0]), (348, [1, 2, 0])]
    data = mixture(schedule=schedule, stop=354, mini_epochs=2, remainder="drop")
    plan = data_plan(DataLoader(data, batch_size=13, drop_last=True), epochs=1, ranks=3)
    assert [stage.step for stage in plan.stages] == [0, None]
    assert plan.steps[-1] < plan.steps_per_epoch


def test_a_step_of_padding_alone_has_the_shares_that_it_repeats() -> None:
    loader = DataLoader(mixture(stop=406, mini_epochs=3), batch_size=9)
    plan = data_plan(loader, epochs=1, ranks=5)
    rows = Ledger(loader, world_size=5).rows(plan.steps_per_epoch - 1)
    assert rows.positions.min() >= 406
    had = Counter(rows.sources.tolist())
    assert plan.curve[-1] == pytest.approx([had[number] / had.total() for number in range(3)])


def test_a_change_by_set_weights_begins_where_the_plan_says() -> None:
    plan = data_plan(DataLoader(mixture(), batch_size=10), epochs=3)
    assert [stage.begin for stage in plan.stages] == [0, 300, 1500]
    changed = mixture(schedule=SCHEDULE[:1])
    assert changed.set_weights([1, 1, 0], at=300) == plan.stages[1].bound
    assert data_plan(DataLoader(changed, batch_size=10)).stages[1].begin == plan.stages[1].bound
    long = Mixture([range(10), range(10)], schedule=[(0, [1, 1]), (5000, [1, 3])], stop=100_000, rank=0, world_size=1)
    assert data_plan(DataLoader(long, batch_size=10)).stages[1].bound == 8192


def test_filters_and_state(tmp_path: Path) -> None:
    mask = np.arange(3000) % 3 > 0
    np.save(tmp_path / "data.npy", np.zeros((3000, 2)))
    table = ArrayDataset(tmp_path / "data.npy", rank=0, world_size=1)
    mixed = Mixture([(Subset(table, mask), 1), (Subset(Subset(range(3000), mask), np.arange(900)), 1)], stop=500)
    plan = data_plan(DataLoader(mixed, batch_size=10), epochs=2)
    assert [(source.rows, source.kept, source.samples) for source in plan.sources] == [
        (3000, 2000, 2000),
        (3000, 900, 900),
    ]
    assert plan.state_bytes == len(json.dumps(mixed.state_dict()))
    assert plan.filter_bytes >= 3 * 3000 // 8 - 8
    (alone,) = data_plan(DataLoader(Subset(table, mask), batch_size=10), epochs=2).sources
    assert (alone.rows, alone.kept, alone.had, alone.passes) == (3000, 2000, 4000, 2.0)
    assert (alone.again, alone.again_step) == (2000, 200)


def test_packs() -> None:
    lengths = np.random.default_rng(0).integers(1, 40, 600)
    documents = Subset(Documents(lengths), np.arange(600) < 400)
    packs = PackedDataset(documents, 64, lengths=lengths[:400], rank=0, world_size=1)
    plan = data_plan(DataLoader(packs, batch_size=2), epochs=2)
    (source,) = plan.sources
    assert plan.unit == "pack"
    assert (source.rows, source.kept, source.samples, source.had) == (600, 400, packs.packs, 2 * packs.packs)
    assert source.tokens == 2 * lengths[:400].sum()
    mixed = data_plan(DataLoader(Mixture([(packs, 1), (packs, 1)], stop=100), batch_size=2), epochs=1)
    assert [source.had for source in mixed.sources] == [50, 50]


def test_excluded_rows() -> None:
    lengths = np.full(600, 5)
    plain = PackedDataset(Documents(lengths), 64, lengths=lengths, exclude=[1, 2, 3], rank=0, world_size=1)
    assert [source.excluded for source in data_plan(DataLoader(plain, batch_size=2)).sources] == [3]
    inside = Subset(Mixture([(range(100), 1)], exclude=[[5, 90]], rank=0, world_size=1), np.arange(100) < 50)
    for data, excluded in (
        (Mixture([(range(100), 1), (range(50), 1)], exclude={"source 1": [7, -1]}, rank=0, world_size=1), [0, 2]),
        (Mixture([(plain, 1), (range(50), 1)], exclude=[[4], None], stop=10, rank=0, world_size=1), [4, 0]),
        (inside, [1]),
    ):
        sources = data_plan(DataLoader(data, batch_size=10), epochs=1).sources
        assert [source.excluded for source in sources] == excluded


def test_steps_that_leave_samples_out() -> None:
    data = mixture(stop=103, schedule=[(0, [1, 1, 1]), (101, [1, 0, 0])])
    plan = data_plan(DataLoader(data, batch_size=10, drop_last=True), epochs=2)
    assert plan.steps_per_epoch == 10
    assert plan.stages[1].step == 10  # positions 100 to 102 are in no step


def test_what_makes_no_sense() -> None:
    loader = DataLoader(
        range(100), batch_size=10, sampler=DistributedSampler(range(100), num_replicas=1, rank=0, seed=0)
    )
    with pytest.raises(ConfigError, match="no order of its own"):
        data_plan(loader)
    with pytest.raises(ConfigError, match="epochs must be positive"):
        data_plan(DataLoader(mixture(), batch_size=10), epochs=0)
    with pytest.raises(ConfigError, match="has no step"):
        data_plan(DataLoader(mixture(stop=5, schedule=[(0, [1, 1, 1])]), batch_size=10, drop_last=True))
