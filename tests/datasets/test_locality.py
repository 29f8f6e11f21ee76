"""Shards that are dealt to nodes: states load on any number of them, and what makes no sense is refused."""

from __future__ import annotations

import itertools
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from loader_conformance import travelled

import penstock as ps
from penstock.errors import ConfigError, PartitionError, StateError
from penstock.ledger.ledger import Ledger
from penstock.shards.writer import ShardWriter

N = 120
Numbers = list[int]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> ps.Manifest:
    path = tmp_path_factory.mktemp("rows") / "meta.txt"
    path.write_text("".join(f"{i}.jpg {i}\n" for i in range(N)))
    return ps.Manifest.open(path)


def make(rows: Any, rank: int, ranks: int, nodes: int | None, **options: Any) -> ps.RankDataset:
    how = {"shuffle": "block", "block_size": 4, "window": 2, "seed": 1, **options}
    return ps.RankDataset(rows, rank=rank, world_size=ranks, locality="node", nodes=nodes, **how)


def had(dataset: Any) -> Numbers:
    return [row for _, _, row in dataset.__getitems__(range(len(dataset)))]


def by_node(rows: Any, ranks: int, nodes: int, epoch: int, **options: Any) -> list[set[int]]:
    found: list[set[int]] = [set() for _ in range(nodes)]
    for rank in range(ranks):
        dataset = make(rows, rank, ranks, nodes, **options)
        dataset.set_epoch(epoch)
        found[rank * nodes // ranks] |= set(had(dataset))
    return found


@pytest.mark.parametrize("shuffle", ["block", "global"])
def test_nodes_keep_most_of_their_rows(rows: ps.Manifest, shuffle: str) -> None:
    sizes = {"shuffle": shuffle} if shuffle == "block" else {"shuffle": shuffle, "block_size": None, "window": None}
    epochs = [by_node(rows, 8, 4, epoch, **sizes) for epoch in range(3)]
    for nodes in epochs:
        assert sorted(row for node in nodes for row in node) == list(range(N))
    for before, after in itertools.pairwise(epochs):
        for mine, then in zip(before, after, strict=True):
            assert len(mine & then) >= 26  # of 30: an eighth is 3.75


@given(
    world=st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2), (6, 3)]),
    stops=st.lists(st.tuples(st.sampled_from([(1, 1), (3, 3), (4, 2), (4, 4)]), st.integers(0, 12)), max_size=3),
    mini_epochs=st.integers(1, 3),
    remainder=st.sampled_from(["pad", "uneven"]),
)
def test_a_state_loads_on_other_nodes(
    rows: ps.Manifest, world: tuple[int, int], stops: list[Any], mini_epochs: int, remainder: str
) -> None:
    """Nothing is lost or comes twice, and positions keep their rows; the next epoch is dealt to the new nodes."""
    options = {"mini_epochs": mini_epochs, "remainder": remainder}
    found: Counter[int] = Counter()
    state: Any = None
    first: Any = None
    for number, ((ranks, nodes), count) in enumerate([*stops, (world, -1)]):
        datasets = [make(rows[:57], rank, ranks, nodes, **options) for rank in range(ranks)]
        for dataset in datasets:
            if state is not None:
                dataset.load_state_dict(state)
        order = datasets[0].plan.view().order[np.arange(57)].tolist()
        first = first or order
        assert order == first
        while datasets[0].epoch == 0:
            size = len(datasets[0])
            take = size if number == len(stops) else min(count, size)
            for dataset in datasets:
                found.update(had(dataset)[:take])
            state = travelled(datasets[0].state_dict(take))
            count -= take
            if number < len(stops) and count <= 0:
                break
            for dataset in datasets:
                dataset.next_mini_epoch()
            state = travelled(datasets[0].state_dict())
        if datasets[0].epoch:
            new = make(rows[:57], 0, ranks, nodes, **options)
            new.set_epoch(1)
            assert had(datasets[0]) == had(new)
            break
    assert sorted(found) == list(range(57))
    most = max([world[0], *(ranks for (ranks, _), _ in stops)]) * mini_epochs
    assert sum(found.values()) - 57 <= (0 if remainder == "uneven" else most - 1)


def test_nodes_are_those_of_the_process_that_reads_a_pickle(rows: ps.Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    early = pickle.dumps(make(rows, None, None, None))
    for name, value in {"RANK": "3", "WORLD_SIZE": "6", "GROUP_WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert had(pickle.loads(early)) == had(make(rows, 3, 6, 3))


def test_nodes_are_those_of_the_job(rows: ps.Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUP_WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    told = make(rows, 3, 6, None)
    assert had(told) == had(make(rows, 3, 6, 3))
    travels = pickle.dumps(told)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    monkeypatch.delenv("GROUP_WORLD_SIZE")
    assert had(pickle.loads(travels)) == had(told)
    assert had(make(rows, 0, 1, None)) == had(make(rows, 0, 1, 1))
    with pytest.raises(ConfigError, match="6 ranks run: pass nodes=, or start the job with torchrun"):
        had(make(rows, 0, 6, None))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "6")
    assert had(make(rows, 0, 6, None)) == had(make(rows, 0, 6, 1))
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="nodes=2 for 7 ranks"):
        monkeypatch.delenv("LOCAL_WORLD_SIZE")
        had(make(rows, 0, 7, None))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "many")
    with pytest.raises(PartitionError, match="LOCAL_WORLD_SIZE"):
        had(make(rows, 0, 6, None))


@pytest.mark.parametrize("nodes", [[4, 2], [3, 1], [4, 2, 2]])
def test_nodes_with_unequally_many_ranks_are_refused(
    rows: ps.Manifest, monkeypatch: pytest.MonkeyPatch, nodes: list[int]
) -> None:
    """Each rank would count other nodes, and rows would be lost."""
    ranks = sum(nodes)
    for told in ([], [("GROUP_WORLD_SIZE", len(nodes))]):
        for name, value in told:
            monkeypatch.setenv(name, str(value))
        for local in nodes:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
            if told and local * len(nodes) == ranks:
                continue
            with pytest.raises(ConfigError, match=r"on how many nodes|equally many ranks on each|same number of ranks"):
                had(make(rows, 0, ranks, None))


def test_a_group_of_some_ranks_knows_the_nodes_of_the_job(rows: ps.Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"GROUP_WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 4, "WORLD_SIZE": 8}.items():
        monkeypatch.setenv(name, str(value))
    assert had(make(rows, 1, 4, None)) == had(make(rows, 1, 4, 2))


def test_refusals(rows: ps.Manifest) -> None:
    def refused(words: str, **options: Any) -> None:
        with pytest.raises(ConfigError, match=words):
            ps.RankDataset(rows, rank=0, world_size=6, **options)

    refused("unknown locality 'rack': use 'none' or 'node'", locality="rack")
    refused("nodes=3 needs locality='node'", nodes=3)
    refused("shuffle='none' means the order of the file", locality="node", nodes=3, shuffle="none")
    for nodes in (4, 0, -1):
        refused(f"got nodes={nodes} for 6 ranks: pass a positive", locality="node", nodes=nodes)
    refused("nodes= takes an integer", locality="node", nodes="3")
    refused("locality= takes 'none' or 'node', got True", locality=True)
    plain = ps.RankDataset(rows, rank=0, world_size=2, shuffle="block", block_size=4, window=2, seed=1)
    local = make(rows, 0, 2, 2)
    with pytest.raises(StateError, match="locality is 'node' in the state and 'none' here"):
        plain.load_state_dict(local.state_dict(3))
    with pytest.raises(StateError, match="locality is missing"):
        local.load_state_dict(plain.state_dict(3))
    for nodes in ([0, 2], [2, 3], [2, 0]):
        with pytest.raises(StateError, match="damaged"):
            local.load_state_dict({**local.state_dict(3), "nodes": nodes})


def write_shards(folder: Path, sizes: Numbers) -> str:
    number = 0
    for shard, size in enumerate(sizes):
        with ShardWriter(str(folder / f"s-{shard:03d}-%d.tar"), maxcount=1000) as writer:
            for _ in range(size):
                writer.write({"__key__": f"{number:06d}", "txt": str(number)})
                number += 1
    return str(folder / "s-*.tar")


def test_shards_stay_whole(tmp_path: Path) -> None:
    sizes = [7, 12, 3, 9, 12, 12, 5, 8, 11, 10, 12, 4] * 3
    urls = write_shards(tmp_path, sizes)
    starts = np.cumsum([0, *sizes])
    kept = np.random.default_rng(0).random(int(starts[-1])) < 0.7
    for chosen in (None, kept):
        pairs = set()
        rows: Numbers = []
        for rank in range(4):
            dataset: Any = ps.ShardDataset(
                urls,
                rank=rank,
                world_size=4,
                locality="node",
                nodes=2,
                shuffle="block",
                block_size=12,
                window=2,
                remainder="uneven",
                decode=True,
            )
            dataset = dataset if chosen is None else ps.Subset(dataset, chosen)
            mine = [int(dataset[index]["txt"]) for index in range(len(dataset))]
            rows += mine
            pairs |= {(rank // 2, shard) for shard in (starts.searchsorted(mine, "right") - 1).tolist()}
        assert sorted(rows) == (list(range(int(starts[-1]))) if chosen is None else np.flatnonzero(kept).tolist())
        assert len(pairs) <= len(sizes) + 2  # two ends of arcs


def test_a_ledger(rows: ps.Manifest) -> None:
    datasets = [make(rows, rank, 4, 2) for rank in range(4)]
    ledger = Ledger(ps.DataLoader(datasets[0], batch_size=5))
    found = ledger.rows(8)  # in epoch 1
    for rank, dataset in enumerate(datasets):
        dataset.set_epoch(1)
        assert found.rows[found.ranks == rank].tolist() == had(dataset)[10:15]
    state = ps.DataLoader(make(rows, 0, 2, 2), batch_size=5).state_dict()
    with pytest.raises(ConfigError, match="the job had 2, and the loader has 4"):
        Ledger(ps.DataLoader(datasets[0], batch_size=5), state=state).rows(0)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_resumes(rows: ps.Manifest, workers: int) -> None:
    def loader(rank: int, ranks: int, nodes: int) -> Any:
        return ps.DataLoader(make(rows, rank, ranks, nodes), batch_size=5, num_workers=workers)

    def taken(batches: Any) -> Numbers:
        return [int(row) for batch in batches for row in batch[2]]

    whole = loader(1, 4, 2)
    batches = iter(whole)
    before = taken([next(batches) for _ in range(2)])
    state = travelled(whole.state_dict())
    rest = taken(batches)
    again = loader(1, 4, 2)
    again.load_state_dict(state)
    assert taken(again) == rest
    assert len(before + rest) == N // 4
    others = [loader(rank, 2, 1) for rank in range(2)]
    for other in others:
        other.load_state_dict(state)
    found = [taken(other) for other in others]
    assert sorted(found[0] + found[1]) == sorted(make(rows, 0, 4, 2).plan.view().order[np.arange(40, N)].tolist())
