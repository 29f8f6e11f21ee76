"""The cases that the design was carried through on paper, each as a program that is stopped and goes on.

Here are those that no suite has in this form. The others:

- two loaders over one sampler: ``test_one_owner.py::test_interleaved_loaders_each_have_a_state_of_their_own``
- users' stateful streams: ``test_owners_of_data.py::test_each_worker_goes_on_in_its_own_range``
- the server's pages: ``tests/server/test_rank_server_dataset.py``, ``test_every_count_resumes_here_and_on_the_file``
  and ``test_the_next_mini_epoch_is_there_before_it_begins``
- resampling: ``tests/wds/test_state.py::test_resumed_at_any_sample``
- a lost node: ``tests/ray/test_ray_faults.py::test_a_node_that_joins_and_one_that_is_lost_in_mid_epoch``
- settings that change in mid-epoch: ``test_tuned.py``,
  ``test_every_way_through_the_settings_gives_the_same_batches_and_states``
- a stream of rows: ``tests/datasets/test_mp_dataset.py``, ``test_batches_are_the_same_for_every_number_of_workers`` and
  ``test_batches_resume_on_other_ranks``
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from entries_support import opened
from full_run import full_only
from loader_support import Draws, draw_load
from source_cases import per_file, write_parquet, write_tar, write_text

import penstock as ps

N = 24


def as_list(samples: list[Any]) -> list[Any]:
    return list(samples)


def row_of(record: ps.Record) -> int:
    return record.row


def label_of(sample: Any) -> int:
    return int(sample["cls"])


def manifest(path: Path) -> ps.Manifest:
    write_text(path / "rows.txt", range(N))
    return ps.Manifest.open(path / "rows.txt")


def had(loader: ps.DataLoader[Any], count: int) -> tuple[list[Any], Any]:
    """Return the first batches of a pass, and the state behind them as it comes back from a file."""
    batches = list(itertools.islice(loader, count))
    return batches, json.loads(json.dumps(loader.state_dict()))


def resumed(loader: ps.DataLoader[Any], state: Any) -> ps.DataLoader[Any]:
    loader.load_state_dict(state)
    return loader


def flat(batches: list[Any]) -> list[Any]:
    return list(itertools.chain.from_iterable(batches))


def order(epoch: int) -> list[int]:
    """Return the rows of an epoch, all ranks together."""
    return [int(row) for row in ps.make_order("global", N, seed=3, epoch=epoch)[np.arange(N)]]


def test_mini_epochs(tmp_path: Path) -> None:
    rows = manifest(tmp_path)

    def make() -> ps.DataLoader[Any]:
        return ps.DataLoader(ps.RankDataset(rows, mini_epochs=3, seed=3, load=row_of), 3, collate_fn=as_list)

    loader = make()
    first = list(loader)
    second, state = had(loader, 1)
    again = resumed(make(), state)
    rest = [*second, *again]
    assert flat(first) + flat(rest) + flat(list(again)) == order(0)
    assert flat([batch for _ in range(3) for batch in again]) == order(1)


@pytest.mark.parametrize("ranks", [1, 3, 5])
def test_a_changed_world_in_the_middle_of_a_mini_epoch(tmp_path: Path, ranks: int) -> None:
    rows = manifest(tmp_path)

    def job(world: int) -> list[ps.DataLoader[Any]]:
        options: dict[str, Any] = {"mini_epochs": 2, "seed": 3, "remainder": "uneven", "load": row_of}
        return [
            ps.DataLoader(ps.RankDataset(rows, rank=rank, world_size=world, **options), 2, collate_fn=as_list)
            for rank in range(world)
        ]

    before = [had(loader, 2) for loader in job(2)]
    assert opened(before[0][1])["sampler"] == opened(before[1][1])["sampler"]
    seen = flat([flat(batches) for batches, _ in before])
    after = [resumed(loader, before[0][1]) for loader in job(ranks)]
    seen += [row for _ in range(2) for loader in after for row in flat(list(loader))]
    assert sorted(seen) == list(range(N))
    assert sorted(row for _ in range(2) for loader in after for row in flat(list(loader))) == list(range(N))


def test_torchs_unseeded_sampler() -> None:
    def make() -> ps.DataLoader[Any]:
        return ps.DataLoader(range(N), 3, sampler=torch.utils.data.RandomSampler(range(N)), collate_fn=as_list)

    torch.manual_seed(1)
    expected = list(torch.utils.data.DataLoader(range(N), 3, shuffle=True, collate_fn=as_list))  # type: ignore[arg-type]
    torch.manual_seed(1)
    first, state = had(make(), 3)
    torch.manual_seed(77)
    assert first + list(resumed(make(), state)) == expected
    torch.manual_seed(78)
    assert first + list(resumed(make(), state)) == expected, "what was drawn is in the state"


def test_draws_of_an_unseeded_run_go_on() -> None:
    def make() -> ps.DataLoader[Any]:
        return ps.DataLoader(Draws(N), 3, shuffle=True, collate_fn=as_list)

    torch.manual_seed(1)
    expected = list(make())
    torch.manual_seed(1)
    first, state = had(make(), 3)
    torch.manual_seed(77)
    assert first + list(resumed(make(), state)) == expected


def test_ranks_of_a_share_under_a_sampler_draw_differently(tmp_path: Path) -> None:
    rows = manifest(tmp_path)
    draws: list[set[float]] = []
    for rank in range(2):
        dataset = ps.RankDataset(rows, rank=rank, world_size=2, seed=3, load=draw_load)
        sampler = ps.RandomSampler(dataset, shuffle="global", seed=5)
        loader = ps.DataLoader(dataset, 3, sampler=sampler, collate_fn=as_list)
        draws.append({draw for _, draw in flat(list(loader))})
    assert not draws[0] & draws[1]


SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "grouped": lambda: {
        "batch_sampler": ps.GroupedBatchSampler(ps.DistributedSampler(range(N), 1, 0, seed=3), [0, 1, 2] * 8, 3)
    },
    "class": lambda: {
        "batch_sampler": ps.GroupedBatchSampler(
            ps.DistributedSampler(range(N), 1, 0, "global", seed=3), [0, 1, 2] * 8, 3, order="class"
        )
    },
    "budget": lambda: {"batch_sampler": ps.TokenBudgetBatchSampler([3, 1, 2] * 8, 6, seed=3, world_size=1, rank=0)},
    "weighted": lambda: {"sampler": ps.WeightedRandomSampler([1.0, 2.0] * 12, N, seed=3), "batch_size": 3},
    "endless": lambda: {"sampler": ps.InfiniteSampler(range(N), seed=3, rank=0, world_size=1), "batch_size": 3},
}


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("stop", [1, 7, 8, 11])
def test_grouped_weighted_and_endless_samplers(name: str, stop: int) -> None:
    def make() -> ps.DataLoader[Any]:
        return ps.DataLoader(range(N), collate_fn=as_list, **SAMPLERS[name]())

    def batches(loader: ps.DataLoader[Any]) -> list[Any]:
        """Return the same number of batches, over as many epochs as it takes."""
        return list(itertools.islice(itertools.chain.from_iterable(iter(loader) for _ in range(9)), 30))

    loader = make()
    stream = itertools.chain.from_iterable(iter(loader) for _ in range(9))
    first = list(itertools.islice(stream, stop))
    state = json.loads(json.dumps(loader.state_dict()))
    assert first + batches(resumed(make(), state))[: 30 - stop] == batches(make())


@full_only("workers for each", but=["0", "None-0", "2-2"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [2, None])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_mixtures_of_streams(tmp_path: Path, workers: int, stop: int | None) -> None:
    shards = per_file(tmp_path, "{:02d}.tar", range(N), write_tar)

    def make() -> ps.DataLoader[Any]:
        sources = [(ps.StreamShards(part, seed=3, load=label_of), 1) for part in (shards[:3], shards[3:])]
        return ps.DataLoader(ps.Mixture(sources, stop=20, tag=True), 3, num_workers=workers, collate_fn=as_list)

    whole = make()
    epochs = [list(whole) for _ in range(2)]
    assert Counter(source for _, source in flat(epochs[0])) == {0: 10, 1: 10}
    first, state = had(make(), len(epochs[0]) + 1 if stop is None else stop)
    again = resumed(make(), state)
    assert (first + list(again) if stop is not None else list(again)) == epochs[stop is None]


@pytest.mark.parametrize("kind", ["text", "parquet"])
def test_grown_manifests(tmp_path: Path, kind: str) -> None:
    def open_rows(rows: int) -> ps.Manifest:
        if kind == "text":
            write_text(tmp_path / f"{rows}.txt", range(rows))
            return ps.Manifest.open(tmp_path / f"{rows}.txt")
        return ps.Manifest.open(per_file(tmp_path, "{:02d}.parquet", range(rows), write_parquet))

    def make(rows: int) -> ps.DataLoader[Any]:
        return ps.DataLoader(ps.RankDataset(open_rows(rows), seed=3, load=row_of), 3, collate_fn=as_list)

    first, state = had(make(16), 2)
    grown = make(N)
    grown.load_state_dict(state, allow_growth=True)
    assert sorted(flat(first + list(grown))) == list(range(16)), "the epoch in progress ends on the rows it began with"
    assert flat(list(grown)) == order(1), "the next one has all"
