"""`MDSDataset`: one rank's share of the samples, through our loaders on every executor, and on after a stop."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mds_writer import write_mds
from text_support import letters

from penstock import DataLoader, DistributedSampler, DocumentDataset, Mixture, count_lengths, generator, tokenize
from penstock.datasets.mds import MDSDataset
from penstock.errors import ConfigError, DataFileError, StateError
from penstock.shards.mds import MDSFolder

N = 53


class Draw:
    """A ``load=`` that draws; at module level, so that it travels."""

    pure = True

    def __call__(self, sample: dict[str, Any]) -> tuple[int, int]:
        return sample["label"], int(generator().integers(1 << 30))


def label(sample: dict[str, Any]) -> int:
    return int(sample["label"])


def fail(sample: dict[str, Any]) -> Any:
    if sample["label"] == 7:
        raise RuntimeError("seven")
    return sample["label"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    samples = [{"label": k, "data": b"x" * (k % 5), "text": f"text {k}"} for k in range(N)]
    folder = tmp_path_factory.mktemp("mds")
    return write_mds(
        folder, {"label": "int", "data": "bytes", "text": "str"}, samples, compression=[None, "zstd", "br"]
    )


def drain(loader: DataLoader) -> list[Any]:
    return [[column.tolist() for column in batch] for batch in loader]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("shuffle", ["global", "block", "none"])
def test_ranks_share_the_samples(root: Path, world: int, shuffle: str) -> None:
    ranks = [MDSDataset(root, rank=r, world_size=world, shuffle=shuffle, seed=3) for r in range(world)]
    assert len({len(dataset) for dataset in ranks}) == 1
    epochs = []
    for epoch in range(2):
        for dataset in ranks:
            dataset.set_epoch(epoch)
        seen = [dataset[i]["label"] for dataset in ranks for i in range(len(dataset))]
        padding = len(seen) - N
        assert sorted(set(seen)) == list(range(N))
        assert sum(count - 1 for count in Counter(seen).values()) == padding < world
        assert [ranks[0].row(i) for i in range(5)] == seen[:5]
        epochs.append(seen)
    assert (epochs[0] == epochs[1]) == (shuffle == "none")


@pytest.mark.parametrize("options", [{"num_workers": 2}, {"num_workers": 2, "executor": "thread"}], ids=str)
def test_batches_do_not_depend_on_the_executor(root: Path, options: dict[str, Any]) -> None:
    def loader(**more: Any) -> DataLoader:
        dataset = MDSDataset(root, rank=1, world_size=2, load=Draw(), seed=5)
        return DataLoader(dataset, batch_size=4, **more)

    expected = drain(loader())
    with loader(**options) as other:
        assert drain(other) == expected


def test_resume_at_every_batch_and_with_other_ranks(root: Path) -> None:
    def make(rank: int = 0, world: int = 1) -> DataLoader:
        return DataLoader(MDSDataset(root, rank=rank, world_size=world, load=Draw(), seed=5), batch_size=4)

    loader = make()
    states, batches = [], []
    for batch in loader:
        batches.append([column.tolist() for column in batch])
        states.append(json.loads(json.dumps(loader.state_dict())))
    assert len(json.dumps(states[0])) < 1000
    for k, state in enumerate(states[:-1]):
        again = make()
        again.load_state_dict(state)
        assert drain(again) == batches[k + 1 :]
    rest = []
    for rank in range(3):
        again = make(rank, 3)
        again.load_state_dict(states[5])
        rest += [label for batch in drain(again) for label in batch[0]]
    had = [label for batch in batches[:6] for label in batch[0]]
    assert set(rest) == set(range(N)) - set(had) or set(had) & set(rest) <= set(had[:2])
    assert set(rest) | set(had) == set(range(N))


def test_states_of_other_data_are_refused_and_growth_is_allowed(root: Path, tmp_path: Path) -> None:
    samples = [{"label": k, "data": b""} for k in range(40)]
    columns = {"label": "int", "data": "bytes"}
    small = MDSDataset(write_mds(tmp_path / "a", columns, samples[:20]), rank=0, world_size=1)
    state = small.state_dict(7)
    with pytest.raises(StateError, match="fingerprint"):
        MDSDataset(root, rank=0, world_size=1).load_state_dict(state)
    grown = MDSDataset(write_mds(tmp_path / "b", columns, samples), rank=0, world_size=1)
    with pytest.raises(StateError, match="samples is 20 in the state and 40 here"):
        grown.load_state_dict(state)
    grown.load_state_dict(state, allow_growth=True)
    assert len(grown) == 13
    grown.next_mini_epoch()
    assert len(grown) == 40


def test_samplers_go_on_top_of_a_folder(root: Path) -> None:
    folder = MDSFolder(root, columns=["label"])
    sampler = DistributedSampler(folder, num_replicas=2, rank=1, shuffle="global", seed=2)
    expected = list(sampler)
    with DataLoader(folder, batch_size=5, sampler=sampler, num_workers=1) as loader:
        labels = [int(label) for batch in loader for label in batch["label"]]
        assert "fingerprint" in json.dumps(loader.state_dict())
    assert labels == expected
    plain = torch.utils.data.DataLoader(folder, batch_size=5, num_workers=0)
    assert [int(label) for batch in plain for label in batch["label"]] == list(range(N))


def test_errors_name_the_sample(root: Path) -> None:
    dataset = MDSDataset(root, rank=0, world_size=1, shuffle="none", load=fail)
    with pytest.raises(RuntimeError, match="seven") as caught:
        dataset.__getitems__(list(range(10)))
    assert any("sample 7 of" in note for note in caught.value.__notes__)


def test_rows_are_those_of_the_folder_whatever_the_order(root: Path, tmp_path: Path) -> None:
    def dataset(**options: Any) -> MDSDataset:
        return MDSDataset(root, seed=3, rank=0, world_size=1, **options)

    for mixture in (
        Mixture([(dataset(), 1)], exclude=[[3]], rank=0, world_size=1),
        Mixture([(dataset(exclude=[3]), 1)], rank=0, world_size=1),
    ):
        assert {sample["label"] for sample in mixture} == {*range(N)} - {3}
    count_lengths(dataset(), tmp_path / "lengths.npy", measure=label, progress=False)
    assert np.load(tmp_path / "lengths.npy").tolist() == list(range(N))
    tokenize(dataset(), tmp_path / "tokens", letters, dtype="uint16", workers=1, progress=False, column="text")
    texts = [item.tolist() for item in DocumentDataset(tmp_path / "tokens", shuffle="none", rank=0, world_size=1)]
    assert texts == [letters(f"text {number}") for number in range(N)]


def test_travels_and_knows_its_options(root: Path) -> None:
    dataset = MDSDataset(root, rank=0, world_size=1, columns=["label"], seed=9)
    dataset.set_epoch(3)
    again = pickle.loads(pickle.dumps(dataset))
    assert [again[i] for i in range(N)] == [dataset[i] for i in range(N)]
    assert again.folder is again.source
    opened = MDSDataset(dataset.folder, rank=0, world_size=1, seed=9)
    assert opened.fingerprint == dataset.fingerprint
    with pytest.raises(ConfigError, match=r"images: give these to MDSFolder"):
        MDSDataset(dataset.folder, images="rgb")


def test_a_sample_without_text_is_named_by_its_shard(tmp_path: Path) -> None:
    texts = [{"text": f"text {k}"} for k in range(12)] + [{"text": "\u00ff"}]
    root = write_mds(tmp_path / "mds", {"text": "str"}, texts, compression=[None, None])
    with pytest.raises(DataFileError, match=r"mds: sample \d+ of shard 1 has the token"):
        tokenize(MDSDataset(root), tmp_path / "out", letters, dtype="int8", workers=1, progress=False)
    with pytest.raises(DataFileError, match=r"mds: sample 0 of shard 0 has no column 'body'"):
        tokenize(MDSDataset(root), tmp_path / "other", letters, column="body", dtype="int8", workers=1, progress=False)


class UpTo:
    """A measure that fails from a sample on: a job that is killed."""

    fingerprint = "label"

    def __init__(self, last: int) -> None:
        self.last = last

    def __call__(self, sample: dict[str, Any]) -> int:
        if sample["label"] > self.last:
            raise RuntimeError("killed")
        return int(sample["label"])


def test_a_count_does_not_continue_on_a_folder_that_was_written_again(tmp_path: Path) -> None:
    write_mds(tmp_path / "mds", {"label": "int"}, [{"label": k} for k in range(2000)], per_shard=500)
    with pytest.raises(RuntimeError, match="killed"):
        count_lengths(MDSDataset(tmp_path / "mds"), tmp_path / "lengths.npy", measure=UpTo(1500))
    write_mds(tmp_path / "mds", {"label": "int"}, [{"label": 7} for _ in range(2000)], per_shard=500)
    found = count_lengths(MDSDataset(tmp_path / "mds"), tmp_path / "lengths.npy", measure=UpTo(1500))
    assert (found.kept, found.tokens) == (0, 14_000)
