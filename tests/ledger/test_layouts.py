"""`Layouts`: a job that goes on with other ranks and batch sizes, asked as a whole, beside what it did."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
from entries_support import closed, opened
from full_run import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from job_support import Job, Leg, Make, flat, recorded
from packed_support import Documents, spans
from pair_support import Pairs

from penstock import (
    DataLoader,
    DistributedSampler,
    Ledger,
    Manifest,
    Mixture,
    PackedDataset,
    RankDataset,
    TokenBudgetBatchSampler,
)
from penstock.errors import ConfigError, StateError
from penstock.ledger.layouts import Layout

LENGTHS = np.random.default_rng(0).integers(1, 40, 150).tolist()


@cache
def manifest() -> Manifest:
    path = Path(mkdtemp()) / "train.txt"
    path.write_text("".join(f"{i:03}.jpg {i % 7}\n" for i in range(53)))
    return Manifest.open(path)


def rank_dataset(rank: int, ranks: int, batch_size: int, **options: Any) -> DataLoader[Any]:
    drop_last = options.pop("drop_last", False)
    return DataLoader(
        RankDataset(manifest(), rank=rank, world_size=ranks, seed=3, **options), batch_size, drop_last=drop_last
    )


def sampler(rank: int, ranks: int, batch_size: int, shuffle: Any = "global", **options: Any) -> DataLoader[Any]:
    data = Pairs(50)
    sampler = DistributedSampler(data, ranks, rank, shuffle=shuffle, seed=2, **options)
    return DataLoader(data, batch_size, sampler=sampler, seed=2 if shuffle is True else None)


def mixture(rank: int, ranks: int, batch_size: int, **options: Any) -> DataLoader[Any]:
    pairs = [(Pairs(30), 3), (Pairs(20, base=30), 2), (Pairs(5, base=50), 1)]
    return DataLoader(Mixture(pairs, stop=70, rank=rank, world_size=ranks, seed=5, **options), batch_size)


def tokens(rank: int, ranks: int, batch_size: int) -> DataLoader[Any]:
    batches = TokenBudgetBatchSampler(LENGTHS, 100, world_size=ranks, rank=rank, seed=2)
    return DataLoader(Pairs(150), batch_sampler=batches)


CASES: dict[str, Make] = {
    "rank": rank_dataset,
    "mini-epochs": lambda *a: rank_dataset(*a, mini_epochs=3),
    "mini-epochs, uneven": lambda *a: rank_dataset(*a, mini_epochs=2, remainder="uneven"),
    "blocks, drop": lambda *a: rank_dataset(*a, shuffle="block", block_size=7, window=2, remainder="drop"),
    "drop_last": lambda *a: rank_dataset(*a, mini_epochs=2, drop_last=True),
    "sampler": sampler,
    "sampler, uneven": lambda *a: sampler(*a, remainder="uneven"),
    "torch's order": lambda *a: sampler(*a, shuffle=True),
    "mixture": mixture,
    "tokens": tokens,
}


def check(job: Job, make: Make, *, each: int = 1) -> Ledger:
    """Ask about every step, and about some rows."""
    ledger = Ledger(make(0, 1, 3), state=json.loads(json.dumps(job.state)))
    bases = np.array([0, 30, 50])
    for step, had in enumerate(job.steps):
        said = ledger.rows(step)
        whole = said.rows + np.where(said.sources >= 0, bases[said.sources], 0)
        assert (whole.tolist(), said.epoch) == ([row for rows in had for row in rows], job.epochs[step]), step
        assert [int((said.ranks == rank).sum()) for rank in range(len(had))] == list(map(len, had))
        last = len(had) - 1
        assert len(ledger.rows(step, rank=last).rows) == len(had[last])
        assert ledger.layout(step).ranks == len(had)
        for at in range(0, len(said.rows), each)[:3]:
            row, source = int(said.rows[at]), int(said.sources[at])
            assert (step, said.epoch, int(said.ranks[at])) in ledger.steps(row, source=source, epoch=said.epoch)
            assert ledger.seen(row, until=step, source=source) == job.times(int(whole[at]), step)
    return ledger


legs = st.lists(st.builds(Leg, st.integers(1, 4), st.integers(1, 6), st.integers(1, 20)), min_size=1, max_size=5)


@pytest.mark.parametrize("name", CASES)
@given(legs)
@settings(max_examples=examples(6, 60))
def test_a_job_that_changes(name: str, legs: list[Leg]) -> None:
    job = recorded(CASES[name], legs)
    check(job, CASES[name])
    assert len(json.dumps(job.state)) < 1024


def test_it_is_two_ranks_then_three_then_one() -> None:
    legs = [Leg(2, 8, 9), Leg(3, 4, 10), Leg(1, 16, 5)]
    job = recorded(rank_dataset, legs)
    ledger = check(job, rank_dataset)
    assert [layout[:1] + layout[6:8] for layout in ledger.layouts] == [(0, 2, 8), (9, 3, 4), (19, 1, 16)]
    assert (ledger.world_size, ledger.batch_size, ledger.steps_per_epoch) == (1, 16, 4)
    # So does a loader that goes on from it, and it need not be one of the job's.
    loader = rank_dataset(0, 1, 16)
    loader.load_state_dict(job.state)
    assert Ledger(loader).layouts == ledger.layouts
    assert Ledger(loader).rows(12).rows.tolist() == ledger.rows(12).rows.tolist()


def test_a_job_that_left_steps_of_padding_out() -> None:
    # The third mini-epoch of 53 rows for 4 ranks has five steps, of which the last is padding alone.
    job = recorded(CASES["mini-epochs"], [Leg(4, 1, 14), Leg(1, 1, 3)])
    assert [layout.step for layout in check(job, CASES["mini-epochs"]).layouts] == [0, 14]


def test_a_job_that_goes_on_as_it_was_has_one_layout() -> None:
    legs = [Leg(2, 8, 3), Leg(2, 8, 1), Leg(2, 8, 7)]
    assert len(recorded(sampler, legs).entries["layouts"]) == 1
    # Nor has one that was begun otherwise and had no step.
    state = recorded(sampler, [Leg(2, 8, 3)]).state
    loader = sampler(0, 3, 5)
    loader.load_state_dict(state)
    assert len(opened(loader.state_dict())["layouts"]) == 2
    job = recorded(sampler, [Leg(4, 2, 0), Leg(2, 8, 2)], state)
    assert len(job.entries["layouts"]) == 1


def test_a_state_from_before_counts_as_of_one_layout() -> None:
    entries = recorded(sampler, [Leg(2, 8, 9)]).entries
    del entries["layouts"]
    state = closed(entries)
    assert len(Ledger(sampler(0, 1, 8), state=state, world_size=2).layouts) == 1
    old = Ledger(sampler(0, 2, 8), state=state)
    assert old.rows(5).rows.tolist() == Ledger(sampler(0, 2, 8)).rows(5).rows.tolist()
    # What goes on from it with other batches is counted from there.
    job = recorded(sampler, [Leg(2, 5, 3)], state)
    assert [layout[0] for layout in job.entries["layouts"]] == [0, 12]
    again = Ledger(sampler(0, 2, 5), state=job.state)
    assert [again.rows(12 + n).rows.tolist() for n in range(3)] == [flat(ranks) for ranks in job.steps]


def test_the_last_layouts_are_kept() -> None:
    legs = [Leg(1 + n % 2, 1, 2) for n in range(40)]
    job = recorded(sampler, legs)
    assert len(job.entries["layouts"]) == 32
    ledger = Ledger(sampler(0, 1, 1), state=job.state)
    for step in range(16, 80):
        assert ledger.rows(step).rows.tolist() == flat(job.steps[step])
    for question in (lambda: ledger.rows(15), lambda: ledger.steps(1, epoch=0), lambda: ledger.seen(1, until=70)):
        with pytest.raises(ConfigError, match="stores the last 32 layouts of a job, here from step 16 in epoch 0"):
            question()


def test_who_goes_back_counts_as_if_nothing_had_changed() -> None:
    loader = sampler(0, 2, 5)
    loader.load_state_dict(recorded(sampler, [Leg(3, 8, 5)]).state)
    assert len(opened(loader.state_dict())["layouts"]) == 2
    next(iter(loader))
    loader.set_epoch(0)
    next(iter(loader))
    assert [Layout(*one) for one in opened(loader.state_dict())["layouts"]] == list(Ledger(sampler(0, 2, 5)).layouts)


def test_steps_in_which_other_rows_were_excluded() -> None:
    def excluding(rows: Any) -> Make:
        return lambda *a: rank_dataset(*a, exclude=rows)

    first = recorded(rank_dataset, [Leg(2, 4, 4)])
    second = recorded(excluding([3, 4, 5]), [Leg(2, 4, 8)], first.state)
    clean, plain = (Ledger(make(0, 1, 1), state=second.state) for make in (excluding([3, 4, 5]), rank_dataset))
    for step, had in enumerate(first.steps):
        assert plain.rows(step).rows.tolist() == flat(had)
        with pytest.raises(ConfigError, match=f"step {0} the job excluded other rows"):
            clean.rows(step)
    for step, had in enumerate(second.steps, 4):
        assert clean.rows(step).rows.tolist() == flat(had)
        with pytest.raises(ConfigError, match="the hashes are"):
            plain.rows(step)
    assert clean.steps(7, epoch=1)
    for question in (lambda: clean.steps(7, epoch=0), lambda: clean.seen(7, until=10)):
        with pytest.raises(ConfigError, match="with the exclude= of that time"):
            question()


def test_data_that_has_grown(tmp_path: Path) -> None:
    path = tmp_path / "train.txt"

    def make(rank: int, ranks: int, batch_size: int) -> DataLoader[Any]:
        return DataLoader(RankDataset(Manifest.open(path), rank=rank, world_size=ranks, seed=3), batch_size)

    path.write_text("".join(f"{i:03}.jpg {i % 7}\n" for i in range(20)))
    state = recorded(make, [Leg(1, 4, 7)]).state
    path.write_text("".join(f"{i:03}.jpg {i % 7}\n" for i in range(30)))
    loader = make(0, 1, 4)
    loader.load_state_dict(state, allow_growth=True)
    list(loader)
    had = [batch[2].tolist() for batch in loader]
    ledger = Ledger(loader)
    assert [layout.step for layout in ledger.layouts] == [0, 10]
    assert [ledger.rows(10 + n).rows.tolist() for n in range(8)] == had
    with pytest.raises(ConfigError, match="had 20 samples per epoch, and the loader has 30"):
        ledger.rows(9)


def test_packs_that_are_dealt_by_cost() -> None:
    def make(rank: int, ranks: int, batch_size: int) -> DataLoader[Any]:
        data = Documents(LENGTHS)
        packs = PackedDataset(data, 64, rank=rank, world_size=ranks, seed=1, balance=2, mini_epochs=2)
        return DataLoader(packs, batch_size, seed=None)

    def documents(batch: Any) -> list[int]:
        each = ({name: values[n] for name, values in batch.items()} for n in range(len(batch["labels"])))
        return [document for pack in each for document, _, _ in spans(pack)]

    state, step = None, 0
    had: list[list[int]] = []
    for ranks, steps in ((2, 3), (3, 9), (1, 4)):
        loaders = [make(rank, ranks, 2) for rank in range(ranks)]
        for loader in loaders if state else ():
            loader.load_state_dict(state)
        while steps:
            for batches in zip(*loaders, strict=True):
                had.append(flat(map(documents, batches)))
                steps -= 1
                if not steps:
                    break
        state = loaders[0].state_dict()
    ledger = Ledger(make(0, 1, 2), state=state)
    for step, rows in enumerate(had):
        said = ledger.rows(step)
        assert said.rows.tolist() == rows
        assert step in [found.step for found in ledger.steps(rows[0], epoch=said.epoch)]


@pytest.mark.parametrize(
    "layouts", [3, [[1, 2]], [[0] * 10], [[0, 0, 5, 0, 0, 0, 1, 1, 50, 0]], [[0, 0, 0, 0, 60, 0, 1, 1, 50, 0]]]
)
def test_a_damaged_state(layouts: Any) -> None:
    state = closed({**recorded(sampler, [Leg(2, 8, 1)]).entries, "layouts": layouts})
    for use in (sampler(0, 2, 8).load_state_dict, lambda state: Ledger(sampler(0, 2, 8), state=state)):
        with pytest.raises(StateError, match="damaged: layouts"):
            use(state)


def test_a_state_that_is_no_answer() -> None:
    state = recorded(sampler, [Leg(2, 8, 1)]).state
    with pytest.raises(ConfigError, match="omit world_size="):
        Ledger(sampler(0, 2, 8), state=state, world_size=3)
    with pytest.raises(StateError, match="does not belong"):
        Ledger(rank_dataset(0, 2, 8), state=state)
