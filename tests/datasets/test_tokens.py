"""`TokenDataset`: every sequence once, the same everywhere, in one copy; files that are odd, or change."""

from __future__ import annotations

import gc
import json
import os
import pickle
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from full_run import full_only
from hypothesis import given
from hypothesis import strategies as st
from interpreter_support import METHODS
from loader_conformance import check_elastic, check_end_of_pass, check_load_into_used, check_resume
from loader_support import EXECUTORS

import penstock as ps
from penstock.datasets.source_dataset import RowCache
from penstock.datasets.tokens import TokenDataset
from penstock.errors import (
    ConfigError,
    DataFileChangedError,
    DataFileError,
    DataFileIOError,
    PartitionError,
    ShardIOError,
    StateError,
)
from penstock.loader.collate import Collate
from penstock.loader.make import Fetch
from penstock.loader.messages import BatchMetrics, BatchRequest

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

LENGTH = 600
"""Tokens in a sequence of the fixture: more than 4 KiB, so batches travel in the ring."""

SEQUENCES = [20, 1, 0, 19]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Four files with a rest each, one of them too short for a sequence; sequence s begins with token s."""
    folder, paths, number = tmp_path_factory.mktemp("tokens"), [], 0
    for k, count in enumerate(SEQUENCES):
        tokens = np.random.default_rng(k).integers(0, 60_000, count * LENGTH + 37 * k, dtype=np.uint16)
        tokens[: count * LENGTH : LENGTH] = range(number, number + count)
        number += count
        paths.append(str(folder / f"t-{k}.{'bin' if k % 2 else 'npy'}"))
        if k % 2:
            tokens.tofile(paths[-1])
        else:
            np.save(paths[-1], tokens)
    return paths


def make(files: list[str], rank: int = 0, world: int = 1, **options: Any) -> TokenDataset:
    return TokenDataset(files, LENGTH, dtype="uint16", rank=rank, world_size=world, **{"seed": 3, **options})


def first_tokens(batch: torch.Tensor) -> list[int]:
    return batch[:, 0].tolist()


def noisy(tokens: torch.Tensor) -> tuple[int, int]:
    return int(tokens[0]), int(ps.generator().integers(1 << 30))


noisy.pure = True  # type: ignore[attr-defined]


def test_items_are_the_files(files: list[str]) -> None:
    dataset = make(files, shuffle="none")
    expected = []
    for path in files:
        tokens = np.load(path) if path.endswith("npy") else np.fromfile(path, np.uint16)
        expected += list(tokens[: len(tokens) // LENGTH * LENGTH].reshape(-1, LENGTH).astype(np.int64))
    assert len(dataset) == len(expected) == sum(SEQUENCES)
    for index, tokens in enumerate(expected):
        assert dataset[index].dtype == torch.int64
        assert dataset[index].tolist() == tokens.tolist()
    batch = next(iter(ps.DataLoader(dataset, batch_size=40)))
    assert np.array_equal(batch.numpy(), np.stack(expected))
    assert make(files, shuffle="none", token_type="int32")[1].dtype == torch.int32
    assert dataset.tokens[-1].tolist() == expected[-1].tolist()
    with pytest.raises(IndexError, match="out of range"):
        dataset.tokens[len(expected)]


@full_only("workers for each", but=["inline", "thread", "noisy-process"])
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("load", [None, noisy])
def test_every_executor_makes_the_same_batches(files: list[str], executor: str, load: Any) -> None:
    def run(executor: str) -> list[Any]:
        dataset = make(files, load=load)
        loader = ps.DataLoader(dataset, batch_size=7, executor=executor, num_workers=EXECUTORS[executor])
        return [[column.tolist() for column in ([b] if load is None else b)] for _ in range(2) for b in loader]

    assert run(executor) == run("inline")
    assert len(run("inline")) == 12


def test_workers_that_are_not_forked_and_torchs_loader(files: list[str]) -> None:
    expected = [batch.tolist() for batch in ps.DataLoader(make(files), batch_size=8)]
    ours = ps.DataLoader(make(files), batch_size=8, num_workers=1, multiprocessing_context=METHODS[-1])
    assert [batch.tolist() for batch in ours] == expected
    for workers in (0, 2):
        theirs = torch.utils.data.DataLoader(make(files), 8, num_workers=workers)
        assert [batch.tolist() for batch in theirs] == expected


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("mini_epochs", [1, 2])
def test_every_sequence_once(files: list[str], ranks: int, mini_epochs: int) -> None:
    seen: Counter[int] = Counter()
    for rank in range(ranks):
        loader = ps.DataLoader(make(files, rank, ranks, mini_epochs=mini_epochs), batch_size=4)
        sizes = []
        for _ in range(mini_epochs):
            had = [token for batch in loader for token in first_tokens(batch)]
            sizes.append(len(had))
            seen.update(had)
        assert sizes == [-(-40 // (ranks * mini_epochs))] * mini_epochs
    assert set(seen) == set(range(40))
    assert seen.total() == -(-40 // (ranks * mini_epochs)) * ranks * mini_epochs


def test_resume_and_elastic_states(files: list[str]) -> None:
    def loader(rank: int = 0, world: int = 1, **options: Any) -> Any:
        return ps.DataLoader(make(files, rank, world, load=noisy, **options), batch_size=4)

    check_resume(lambda: loader(mini_epochs=2))
    check_end_of_pass(loader)
    check_load_into_used(loader)
    check_elastic(loader, lambda batch: batch[0].tolist(), 40, [(2, 2), (3, 1), (1, 3)])
    state = json.loads(json.dumps(ps.DataLoader(make(files), batch_size=4).state_dict()))
    for other in (make(files[:2]), TokenDataset(files, LENGTH, dtype="uint16", stride=LENGTH + 1, seed=3)):
        with pytest.raises(StateError, match="fingerprint"):
            ps.DataLoader(other, batch_size=4).load_state_dict(state)
    dataset = make(files[:2])
    grown = make(files)
    grown.load_state_dict(dataset.state_dict(5), allow_growth=True)
    assert [grown[i][0] for i in range(len(grown))] == [dataset[i][0] for i in range(5, 21)]


@given(st.data())
def test_strides_and_files(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Against the same by slices; rows in any order, of any files."""
    folder = tmp_path_factory.getbasetemp() / "strides"
    folder.mkdir(exist_ok=True)
    length, stride = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 12))
    expected, paths = [], []
    for k, size in enumerate(data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=4))):
        tokens = np.arange(1000 * k, 1000 * k + size, dtype=">u2" if k % 2 else np.int32)
        paths.append(folder / f"{k}-{length}-{stride}-{size}.npy")
        np.save(paths[-1], tokens)
        expected += [tokens[b : b + length].tolist() for b in range(0, size - length + 1, stride)]
    if not expected:
        with pytest.raises(DataFileError, match="too few tokens"):
            TokenDataset(paths, length, stride=stride)
        return
    found = TokenDataset(paths, length, stride=stride, shuffle="none").tokens
    rows = data.draw(st.lists(st.integers(0, len(expected) - 1), min_size=1, max_size=300))
    assert len(found) == len(expected)
    assert [row.tolist() for row in found.records(np.array(rows))] == [expected[row] for row in rows]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 7), st.integers(1, 16))
def test_documents(tmp_path_factory: pytest.TempPathFactory, tokens: list[int], length: int, scan: int) -> None:
    """With an end token, against the same by lists, however much is looked at at a time."""
    expected, document = [], []
    for place, token in enumerate(tokens):
        document.append(token)
        if token == 0 or place == len(tokens) - 1:
            pieces = [document[b : b + length] for b in range(0, len(document), length)]
            expected += [piece + [-1] * (length - len(piece)) for piece in pieces]
            document = []
    path = tmp_path_factory.mktemp("documents") / "a.npy"
    np.save(path, np.array(tokens, np.int16))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.sources.tokens._SCAN", scan)
        dataset = TokenDataset(path, length, end_token=0, pad_token=-1, shuffle="none")
    assert [dataset[i].tolist() for i in range(len(dataset))] == expected
    batch = next(iter(ps.DataLoader(dataset, batch_size=len(expected))))
    assert batch.tolist() == expected
    assert [item.tolist() for item in pickle.loads(pickle.dumps(dataset))] == expected


def test_batches_are_written_where_they_are_delivered(files: list[str]) -> None:
    """One copy: neither samples nor a collation; and what wants samples gets them."""
    dataset = make(files)
    given_: list[torch.Tensor] = []

    def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        given_.append(torch.empty(shape, dtype=dtype))
        return given_[-1]

    batch = dataset.fetch_batch([5, 0, 5], None, empty)
    assert batch is given_[0]
    assert torch.equal(batch, torch.stack([dataset[5], dataset[0], dataset[5]]))
    fetch = Fetch(dataset, Collate(), batched=True, seed_globals=False)
    metrics = BatchMetrics()
    fetch(BatchRequest([1, 2], [1, 2]), metrics)
    assert (metrics.collate, metrics.samples) == (0.0, 2)
    assert not fetch.divisible
    own = ps.DataLoader(make(files), batch_size=4, collate_fn=lambda items: [int(item[0]) for item in items])
    assert [token for some in own for token in some] == [int(dataset[i][0]) for i in range(40)]


@given(st.data())
def test_rows_ahead_are_those_of_each_index(files: list[str], data: st.DataObject) -> None:
    """Whatever is asked for, in whatever order, at whatever place."""
    share = make(files, 1, 2, mini_epochs=2).plan
    places = [share.shown._replace(epoch=e, mini_epoch=m) for e in range(2) for m in range(2)]
    slices = [share.make_view(place) for place in places]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.datasets.source_dataset._BLOCK", data.draw(st.integers(1, 12)))
        ahead = RowCache()
        for _ in range(data.draw(st.integers(1, 8))):
            number, begin = data.draw(st.integers(0, 3)), data.draw(st.integers(-3, 9))
            indices = list(range(begin, data.draw(st.integers(begin, 10))))
            if data.draw(st.booleans()):
                indices = data.draw(st.permutations(indices))
            expected = [slices[number].locate(index)[1] for index in indices]
            assert ahead.rows(share.view(places[number]), indices).tolist() == expected
    with pytest.raises(IndexError):
        ahead.rows(share.view(), [9, 10])


class Faulty(TokenDataset):
    """The fifth index fails, in a batch as by itself."""

    def fetch_batch(self, indices: Any, keys: Any, empty: Any, place: Any = None) -> Any:
        batch = super().fetch_batch(indices, keys, empty, place)
        self._look(indices)
        return batch

    def load_samples(self, indices: Any, keys: Any, place: Any = None) -> list[Any]:
        self._look(indices)
        return super().load_samples(indices, keys, place)

    def _look(self, indices: Any) -> None:
        if 5 in list(indices):
            raise ValueError("the fifth")


@pytest.mark.filterwarnings("ignore:sample 5")
@pytest.mark.parametrize("executor", EXECUTORS)
def test_on_error_finds_the_sample(files: list[str], executor: str) -> None:
    dataset = Faulty(files, LENGTH, dtype="uint16", seed=3)
    assert dataset.makes_batches
    options = {"batch_size": 4, "executor": executor, "num_workers": EXECUTORS[executor]}
    loader = ps.DataLoader(dataset, on_error="skip", **options)
    found = [batch.clone() for _ in range(2) for batch in loader][:10]
    assert [len(batch) for batch in found] == [4, 3, 4, 4, 4, 4, 4, 4, 4, 4]
    assert torch.equal(torch.cat(found), torch.stack([item for k, item in enumerate(make(files)) if k != 5]))
    assert loader.stats()["samples"] == 2 * 40  # those asked for, each once
    with pytest.raises(ValueError, match="the fifth"):
        list(ps.DataLoader(Faulty(files, LENGTH, dtype="uint16"), **options))


class Doubled(TokenDataset):
    def __getitem__(self, index: int) -> Any:
        return 2 * super().__getitem__(index)


class Negative(TokenDataset):
    def load_samples(self, indices: Any, keys: Any, place: Any = None) -> list[Any]:
        return [-tokens for tokens in super().load_samples(indices, keys, place)]


@pytest.mark.filterwarnings("ignore:Doubled does not declare itself pure")
@pytest.mark.parametrize("kind, factor", [(Doubled, 2), (Negative, -1)])
def test_subclasses_are_not_passed_by(files: list[str], kind: Any, factor: int) -> None:
    expected = torch.stack(list(make(files)))
    for executor, workers in EXECUTORS.items():
        dataset = kind(files, LENGTH, dtype="uint16", seed=3)
        loader = ps.DataLoader(dataset, batch_size=40, executor=executor, num_workers=workers)
        assert torch.equal(next(iter(loader)), factor * expected)


def test_changed_files(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    tokens = np.arange(4096, dtype=np.uint16)

    def fresh() -> TokenDataset:
        tokens.tofile(path)
        dataset = TokenDataset(path, 16, dtype="uint16", shuffle="none")
        assert dataset[200][0] == 3200
        return dataset

    dataset = fresh()
    os.truncate(path, 1024)
    loader = ps.DataLoader(dataset, 9)
    for read in (lambda: dataset[0], lambda: dataset.__getitems__([200]), lambda: next(iter(loader))):
        with pytest.raises(DataFileChangedError, match=r"a\.bin was changed .* 8192 bytes and has 1024"):
            read()
    for executor, workers in EXECUTORS.items():
        dataset = fresh()
        ahead = 1 if workers else None
        loader = ps.DataLoader(dataset, 16, executor=executor, num_workers=workers, prefetch_factor=ahead)
        batches = iter(loader)
        next(batches)
        os.utime(path, ns=(1, 1))
        with pytest.raises(DataFileChangedError, match="modification time differs"):
            list(batches)
    dataset = fresh()
    handle = pickle.dumps(dataset)
    other = tmp_path / "b.bin"
    tokens[::-1].tofile(other)
    other.rename(path)
    assert dataset[200][0] == 3200  # the old file, as it was
    with pytest.raises(DataFileChangedError, match="Open the dataset again"):
        pickle.loads(handle)[0]
    path.unlink()
    with pytest.raises(DataFileIOError, match="no such file"):
        pickle.loads(handle)[0]


def test_odd_files(tmp_path: Path) -> None:
    def written(name: str, data: bytes) -> Path:
        (tmp_path / name).write_bytes(data)
        return tmp_path / name

    good = tmp_path / "good.npy"
    np.save(good, np.arange(100, dtype=np.uint16))
    cut = written("cut.npy", good.read_bytes()[:-3])
    square, floats, names = tmp_path / "square.npy", tmp_path / "floats.npy", tmp_path / "names.npy"
    np.save(square, np.zeros((3, 3), np.int32))
    np.save(floats, np.zeros(9))
    np.save(names, np.array(["a", None], object), allow_pickle=True)
    for source, options, error, message in (
        (written("odd.bin", bytes(33)), {"dtype": "uint16"}, DataFileError, "33 bytes, which is not a whole number"),
        (written("empty.bin", b""), {"dtype": "uint16"}, DataFileError, "too few tokens"),
        (written("short.bin", bytes(4)), {"dtype": "uint16"}, DataFileError, "too few tokens"),
        (written("raw.bin", bytes(64)), {}, ConfigError, "does not tell its dtype"),
        (written("text.npy", b"no array"), {}, DataFileError, r"text\.npy is not an \.npy file"),
        (cut, {}, DataFileError, r"cut\.npy is not an \.npy file that can be mapped, or is truncated"),
        (square, {}, DataFileError, r"int32 of shape \(3, 3\): tokens are one row"),
        (floats, {}, DataFileError, "float64"),
        (names, {}, DataFileError, r"names\.npy"),
        (good, {"dtype": "int32"}, ConfigError, "holds uint16, not int32"),
        (good, {"token_type": "int8"}, ConfigError, "cannot hold"),
        (good, {"token_type": "float32"}, ConfigError, "name of an integer dtype"),
        (good, {"token_type": "tokens"}, ConfigError, "name of an integer dtype"),
        (good, {"token_type": ">i8"}, ConfigError, "name of an integer dtype"),
        (good, {"end_token": 65536}, ConfigError, "holds uint16, in which no token is end_token=65536"),
        (good, {"end_token": -1}, ConfigError, "no token is end_token=-1"),
        (good, {"end_token": 0.5}, ConfigError, "end_token must be an integer"),
        (good, {"end_token": 0, "pad_token": 1 << 63}, ConfigError, "pad_token=.* token_type='int64' can hold"),
        (good, {"end_token": 0, "pad_token": 1 << 31, "token_type": "int32"}, ConfigError, "pad_token=.*='int32'"),
        (good, {"end_token": 0, "pad_token": -1, "token_type": "uint16"}, ConfigError, "pad_token=-1 .*='uint16'"),
        (good, {"pad_token": "0"}, ConfigError, "pad_token must be an integer"),
        (tmp_path / "raw.bin", {"dtype": "foo"}, ConfigError, "such as 'uint16', .* got 'foo'"),
        (tmp_path / "raw.bin", {"dtype": torch.int16}, ConfigError, r"numpy\.uint16, got torch\.int16"),
        (tmp_path / "raw.bin", {"dtype": "S"}, ConfigError, "types of integers"),
        (tmp_path / "raw.bin", {"dtype": "float32"}, ConfigError, "types of integers"),
        (good, {"stride": 0}, ConfigError, "positive"),
        (good, {"stride": 3, "end_token": 0}, ConfigError, "packed"),
        (good, {"shuffle": "all"}, ConfigError, "unknown shuffle"),
        (good, {"rank": 3, "world_size": 2}, PartitionError, "rank"),
        (tmp_path, {"dtype": "uint16"}, DataFileIOError, "folder"),
        (tmp_path / "none.bin", {"dtype": "uint16"}, DataFileIOError, "no such file"),
        (f"{tmp_path}/none-*.bin", {"dtype": "uint16"}, ShardIOError, "none-"),
    ):
        with pytest.raises(error, match=message):
            TokenDataset(source, 8, **options)
    assert len(TokenDataset(good, 8)) == 12


@full_only("a large file")
def test_memory_does_not_grow_with_the_tokens(tmp_path: Path) -> None:
    sizes = []
    for count in (80_000, 4_000_000):
        path = tmp_path / f"{count}.bin"
        np.ones(count, np.uint16).tofile(path)
        TokenDataset(path, 16, dtype="uint16", end_token=1)  # the index is in the cache from now on
        gc.collect()
        tracemalloc.start()
        for options in ({}, {"end_token": 1}):
            dataset = TokenDataset(path, 16, dtype="uint16", **options)
            for begin in range(0, len(dataset) - 64, len(dataset) // 50):
                dataset.__getitems__(range(begin, begin + 64))
        sizes.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert sizes[1] < sizes[0] + 20_000


def test_a_batch_in_progress_does_not_see_the_next_epoch(files: list[str]) -> None:
    """The place travels with the task: an iterator goes on with its own epoch."""
    dataset = make(files)
    expected = [first_tokens(batch) for batch in ps.DataLoader(make(files), batch_size=8)]
    batches = iter(ps.DataLoader(dataset, batch_size=8, num_workers=1))
    got = [first_tokens(next(batches))]
    dataset.set_epoch(1)
    got += [first_tokens(batch) for batch in batches]
    assert got == expected
