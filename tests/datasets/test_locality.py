"""``locality="node"``: a rank reads the same rows in every epoch, in an order that no number of ranks changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from entries_support import closed, opened
from loader_conformance import travelled

import penstock as ps
from penstock.errors import ConfigError, StateError

N = 13_000
Numbers = list[int]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> ps.Manifest:
    path = tmp_path_factory.mktemp("rows") / "meta.txt"
    path.write_text("".join(f"{i}.jpg {i}\n" for i in range(N)))
    return ps.Manifest.open(path)


def make(rows: Any, rank: int, ranks: int, **options: Any) -> ps.RankDataset:
    how = {"shuffle": "block", "block_size": 4, "seed": 1, **options}
    return ps.RankDataset(rows, rank=rank, world_size=ranks, locality="node", **how)


def rows_of(dataset: Any) -> Numbers:
    numbers: Numbers = dataset.rows(range(len(dataset))).tolist()
    return numbers


@pytest.mark.parametrize("options", [{}, {"shuffle": "global", "block_size": None}, {"mini_epochs": 3}])
def test_ranks_read_the_same_rows_in_every_epoch(rows: ps.Manifest, options: dict[str, Any]) -> None:
    found = []
    for epoch in range(2):
        found.append([])
        for rank in range(8):
            dataset = make(rows, rank, 8, remainder="uneven", **options)
            dataset.set_epoch(epoch)
            mine: set[int] = set()
            while dataset.epoch == epoch:
                mine |= set(rows_of(dataset))
                dataset.next_mini_epoch()
            found[epoch].append(mine)
        assert sorted(row for mine in found[epoch] for row in mine) == list(range(N))
    assert found[0] == found[1]


def test_the_order_is_the_same_on_any_number_of_ranks(rows: ps.Manifest) -> None:
    orders = []
    for ranks in (1, 5, 8):
        dataset = make(rows, 0, ranks)
        dataset.set_epoch(2)
        orders.append(dataset.plan.view().order[np.arange(N)].tolist())
    assert orders[0] == orders[1] == orders[2]


def test_a_state_loads_on_other_ranks(rows: ps.Manifest) -> None:
    """Nothing is lost or comes twice."""
    found: Numbers = []
    state: Any = None
    for ranks, count in ((4, 700), (3, 1000), (6, None)):
        datasets = [make(rows, rank, ranks, remainder="uneven") for rank in range(ranks)]
        for dataset in datasets:
            if state is not None:
                dataset.load_state_dict(state)
            found += rows_of(dataset)[:count]
        state = travelled(datasets[0].state_dict(count or 0))
    assert sorted(found) == list(range(N))


def test_rows_that_a_filter_keeps(rows: ps.Manifest) -> None:
    kept = np.flatnonzero(np.arange(N) % 20)
    subset: Any = [ps.Subset(make(rows, rank, 2, remainder="uneven"), kept) for rank in range(2)]
    first = [set(rows_of(dataset)) for dataset in subset]
    assert sorted(first[0] | first[1]) == kept.tolist()
    for rank, dataset in enumerate(subset):
        dataset.set_epoch(1)
        assert set(rows_of(dataset)) == first[rank]


def test_a_ledger_knows_a_job_on_other_ranks(rows: ps.Manifest) -> None:
    before = [make(rows, rank, 2) for rank in range(2)]
    state = ps.DataLoader(before[0], batch_size=5).state_dict()
    found = ps.Ledger(ps.DataLoader(make(rows, 0, 4), batch_size=5), state=state).rows(7)
    for rank, dataset in enumerate(before):
        assert found.rows[found.ranks == rank].tolist() == rows_of(dataset)[35:40]


def test_refusals(rows: ps.Manifest, tmp_path: Path) -> None:
    def refused(words: str, **options: Any) -> None:
        with pytest.raises(ConfigError, match=words):
            ps.RankDataset(rows, rank=0, world_size=6, **options)

    refused("unknown locality 'rack': use 'none' or 'node'", locality="rack")
    refused("shuffle='none' means the order of the file", locality="node", shuffle="none")
    refused("locality= takes 'none' or 'node', got True", locality=True)
    refused("leave window= out", locality="node", shuffle="block", window=4)
    refused("needs no number of nodes", locality="node", nodes=3)
    (tmp_path / "a.txt").write_text("a.jpg 1\n")
    nodes: dict[str, Any] = {"nodes": 3}
    with pytest.raises(ConfigError, match="needs no number of nodes"):
        ps.open(tmp_path / "a.txt", rank=0, world_size=1, locality="node", **nodes)
    plain = ps.RankDataset(rows, rank=0, world_size=2, shuffle="block", block_size=4, seed=1)
    local = make(rows, 0, 2)
    with pytest.raises(StateError, match="locality is 'virtual nodes' in the state and 'none' here"):
        plain.load_state_dict(local.state_dict(3))
    with pytest.raises(StateError, match="locality is missing"):
        local.load_state_dict(plain.state_dict(3))
    with pytest.raises(StateError, match="locality is 'node' in the state and 'virtual nodes' here"):
        local.load_state_dict(closed({**opened(local.state_dict(3)), "locality": "node", "nodes": [1, 2]}))
