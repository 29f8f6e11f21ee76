"""Rank, world size and worker outside of process groups (those are in tests/distributed)."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader, Dataset

from penstock import RankDataset, distributed
from penstock.errors import PartitionError


def test_alone() -> None:
    assert distributed.current() == distributed.World(0, 1)
    assert distributed.worker() == distributed.Worker(0, 1)


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert distributed.current() == (2, 4)
    assert distributed.current(rank=0, world_size=2) == (0, 2), "arguments win"


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RANK": "0"}, "only RANK is set"),
        ({"WORLD_SIZE": "2"}, "only WORLD_SIZE is set"),
        ({"RANK": "zero", "WORLD_SIZE": "2"}, "RANK='zero'"),
        ({"RANK": "", "WORLD_SIZE": "2"}, "must be integers"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "rank 2 is outside the world of 2 .*environment"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "rank -1"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "world of 0"),
    ],
)
def test_a_bad_environment(variables: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(PartitionError, match=words):
        distributed.current()


@pytest.mark.parametrize(("rank", "world"), [(1, None), (None, 2), (2, 2), (-1, 2), (0, 0), (0, -1)])
def test_bad_arguments(rank: int | None, world: int | None) -> None:
    with pytest.raises(PartitionError):
        distributed.current(rank, world)


@pytest.mark.parametrize(
    ("variables", "ranks"),
    [
        ({}, 1),
        ({"RANK": "3", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, 8),
        ({"RANK": "3", "WORLD_SIZE": "16"}, 16),
        ({"LOCAL_WORLD_SIZE": "8"}, 1),
    ],
)
def test_ranks_of_this_machine(variables: dict[str, str], ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert distributed.local_ranks() == ranks


def test_a_bad_number_of_local_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "all"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(PartitionError, match="LOCAL_WORLD_SIZE must be a positive integer, got 'all'"):
        distributed.local_ranks()


def test_slurm_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.setenv("SLURM_NTASKS", "8")
    assert distributed.current() == (0, 1)


def test_resolved_at_first_use_and_frozen(write_manifest, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    dataset = RankDataset(write_manifest(20))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert len(dataset) == 10
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert (dataset.rank, dataset.world_size, len(dataset)) == (1, 2, 10)


class Workers(Dataset[tuple[int, int]]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[int, int]:
        return distributed.worker()


def test_workers() -> None:
    loader = DataLoader(Workers(), num_workers=2)
    assert [(int(number), int(total)) for number, total in loader] == [(0, 2), (1, 2), (0, 2), (1, 2)]
