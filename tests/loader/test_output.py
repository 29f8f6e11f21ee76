"""``output="numpy"``: the same batches as arrays over the same memory, whichever executor makes them."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from loader_conformance import check_close, check_load_into_used, check_resume
from loader_support import EXECUTORS
from matrix_support import Images
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import penstock as ps
from penstock.errors import ConfigError
from penstock.loader.batches import as_arrays, map_batch

ROW = 3_000
"""Numbers of a row: batches of two rows are more than travels in a pipe."""


class Rows(torch.utils.data.Dataset[Any]):
    """Dicts with everything that the default collate function knows."""

    pure = True

    def __init__(self, length: int = 24) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "tensor": torch.full((ROW,), float(index)),
            "array": np.full((2, ROW), index, np.int32),
            "own": float(ps.generator().random()),
            "index": index,
            "nested": (Pair(np.float32(index), [index, index + 1]), str(index)),
        }


class Pair(NamedTuple):
    """Two things."""

    left: Any
    right: Any


@dataclass
class Record:
    """Two things that are no tuple."""

    pixels: Any
    name: str


def in_shared_memory(array: Any) -> bool:
    """Whether an array lies in a file without a name, which is where the slots of the ring are."""
    address = array.__array_interface__["data"][0]
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(one, 16) for one in line.split()[0].split("-"))
        if begin <= address < end:
            return "memfd" in line
    return False


def leaves(batch: Any) -> Iterator[Any]:
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, list | tuple):
        for value in batch:
            yield from leaves(value)
    else:
        yield batch


def make(executor: str, **options: Any) -> ps.DataLoader[Any]:
    """A loader; the arguments of `Rows` make batches that go through the ring."""
    how = {"batch_size": 4, "shuffle": "global", "seed": 3, "executor": executor, "num_workers": EXECUTORS[executor]}
    return ps.DataLoader(Rows(), **{**how, **options})


@pytest.mark.parametrize("executor", EXECUTORS)
def test_batches_are_those_of_torch(executor: str) -> None:
    tensors, arrays = list(make("inline")), []
    with make(executor, output="numpy") as loader:
        for batch in loader:
            arrays.append(batch)
            assert not any(isinstance(leaf, torch.Tensor) for leaf in leaves(batch))
            assert all(leaf.flags.writeable for leaf in leaves(batch) if isinstance(leaf, np.ndarray))
    assert len(arrays) == len(tensors) == 6
    for ours, theirs in zip(arrays, tensors, strict=True):
        assert list(ours) == list(theirs)
        assert type(ours["nested"][0]) is Pair
        for mine, yours in zip(leaves(ours), leaves(theirs), strict=True):
            assert np.array_equal(mine, yours)
            assert type(mine) is np.ndarray or mine == yours
            assert not isinstance(yours, torch.Tensor) or mine.dtype == yours.numpy().dtype


def test_arrays_are_views_of_the_ring() -> None:
    with make("process", output="numpy") as loader:
        where = [in_shared_memory(batch["tensor"]) for batch in loader]
    assert "copy" not in loader.stats()["ways"]
    assert sum(where) == loader.stats()["ways"]["ring"] > 0


def test_a_view_keeps_its_slot() -> None:
    """Of a batch that is gone otherwise, through many more that use the slots again."""
    loader: ps.DataLoader[Any] = ps.DataLoader(Rows(160), 4, executor="process", num_workers=2, output="numpy")
    for number, batch in enumerate(loader):
        if number == 10:
            view, rows = batch["tensor"][1:3, ::2].T, batch["index"][1:3].astype(np.float32)
    assert "copy" not in loader.stats()["ways"]
    assert in_shared_memory(view)
    assert np.array_equal(view, np.broadcast_to(rows, view.shape))


def test_a_batch_is_no_copy_of_what_collate_fn_returns() -> None:
    memory = torch.zeros(8)

    def collate(samples: list[int]) -> torch.Tensor:
        return memory

    (batch,) = ps.DataLoader(range(2), 2, collate_fn=collate, output="numpy")
    batch[3] = 7
    assert memory[3] == 7
    assert np.shares_memory(batch, memory.numpy())


@pytest.mark.parametrize("executor", EXECUTORS)
def test_collate_fn_may_return_arrays_and_what_it_likes(executor: str) -> None:
    how: dict[str, Any] = {"executor": executor, "num_workers": EXECUTORS[executor], "output": "numpy"}
    (batch,) = ps.DataLoader(range(2), 2, collate_fn=records, **how)
    assert isinstance(batch, Record)
    assert np.array_equal(batch.pixels, [0, 1])
    assert batch.name == "both"


def records(samples: list[int]) -> Record:
    return Record(torch.tensor(samples), "both")


class Times(torch.utils.data.Dataset[Any]):
    """Arrays of types that torch lacks."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        at = np.datetime64("2026-11-28") + np.arange(index, index + 2)
        return at, np.array(["a", "bc"][index % 2 :]), np.array([index], ">i4")


@pytest.mark.parametrize("executor", EXECUTORS)
def test_arrays_of_types_that_torch_lacks(executor: str) -> None:
    how: dict[str, Any] = {"executor": executor, "num_workers": EXECUTORS[executor]}
    with pytest.raises(TypeError, match=r"can.t convert np\.ndarray of type numpy\.datetime64"):
        next(iter(ps.DataLoader(Times(), batch_sampler=[[0, 2]], **how)))
    ((times, texts, numbers),) = ps.DataLoader(Times(), batch_sampler=[[0, 2]], output="numpy", **how)
    assert times.dtype == np.dtype("datetime64[D]")
    assert times.tolist() == [Times()[0][0].tolist(), Times()[2][0].tolist()]
    assert texts.tolist() == [["a", "bc"]] * 2
    assert numbers.tolist() == [[0], [2]]


def test_images_keep_their_strides() -> None:
    tensors = next(iter(ps.DataLoader(Images(8), 4, seed=0)))
    arrays = next(iter(ps.DataLoader(Images(8), 4, seed=0, output="numpy")))
    for mine, yours in zip(leaves(arrays), leaves(tensors), strict=True):
        assert np.array_equal(mine, yours)
        assert mine.strides == tuple(step * yours.itemsize for step in yours.stride())


def test_without_batching() -> None:
    loader: ps.DataLoader[Any] = ps.DataLoader(Rows(2), batch_size=None, output="numpy")
    assert [type(sample["tensor"]) for sample in loader] == [np.ndarray] * 2


# DLPack.


@pytest.mark.parametrize("executor", EXECUTORS)
def test_dlpack_shares_the_memory(executor: str) -> None:
    """Other libraries take arrays by ``from_dlpack``; NumPy's and torch's are here."""
    with make(executor, output="numpy") as loader:
        batch = next(iter(loader))["tensor"]
        for taken in (np.from_dlpack(batch), torch.from_dlpack(batch).numpy()):
            assert np.shares_memory(taken, batch)
        tensor = torch.from_dlpack(batch)
        batch[0, 0] = -5
        assert tensor[0, 0] == -5
    with make(executor) as loader:
        given = next(iter(loader))["tensor"]
        assert np.shares_memory(np.from_dlpack(given), given.numpy())


# What is refused, and what survives.


def test_unknown_output_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown output 'jax': use one of 'torch', 'numpy'"):
        ps.DataLoader(range(4), output="jax")


def test_pinned_arrays_are_refused() -> None:
    with pytest.raises(ConfigError, match="leave pin_memory=True out, or use output='torch'"):
        ps.DataLoader(range(4), pin_memory=True, output="numpy")


def test_a_tensor_without_an_array_raises_in_its_place() -> None:
    class Halves(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.tensor(index, dtype=torch.bfloat16 if index == 1 else torch.float32)

    iterator = iter(ps.DataLoader(Halves(), output="numpy"))
    assert next(iterator).tolist() == [0]
    with pytest.raises(ConfigError, match=r"torch.bfloat16 and shape \(1,\).*use output='torch'"):
        next(iterator)
    assert [batch.tolist() for batch in iterator] == [[2], [3]]


def test_it_is_an_attribute_that_counts_from_the_next_pass() -> None:
    loader: ps.DataLoader[Any] = ps.DataLoader(range(4), 4)
    assert loader.output == loader.config.output == "torch"
    assert [type(batch) for batch in loader] == [torch.Tensor]
    loader.output = "numpy"
    assert [type(batch) for batch in loader] == [np.ndarray]
    loader.output = "lists"
    with pytest.raises(ConfigError, match="unknown output 'lists'"):
        iter(loader)


def test_resume() -> None:
    check_resume(lambda: make("inline", output="numpy"))
    check_resume(lambda: make("process", output="numpy"), positions=[0, 5, 6, 13])
    check_load_into_used(lambda: make("thread", output="numpy"))
    check_close(lambda: make("process", output="numpy"))


def test_a_state_says_nothing_of_the_output() -> None:
    """A run may go on with the other one."""
    loader = make("inline", output="numpy")
    next(iter(loader))
    state = json.loads(json.dumps(loader.state_dict()))
    other = make("thread")
    other.load_state_dict(state)
    again = make("inline", output="numpy")
    again.load_state_dict(state)
    assert [batch["index"].tolist() for batch in other] == [batch["index"].tolist() for batch in again]


# Structures.


def test_structures_keep_their_types() -> None:
    class Named(list[Any]):
        pass

    tensor = torch.arange(3)
    batch = {
        "ordered": OrderedDict(a=tensor),
        "list": Named([tensor]),
        "tuple": (tensor, Pair(tensor, 1)),
        "top": torch.max(tensor.float()[None], 1),
        "text": "abc",
        "none": None,
    }
    arrays = as_arrays(batch)
    assert [type(value) for value in arrays.values()] == [type(value) for value in batch.values()]
    assert all(np.array_equal(mine, yours) for mine, yours in zip(leaves(arrays), leaves(batch), strict=True))
    assert batch["ordered"]["a"] is tensor, "the batch that was given stays as it is"


def test_a_packed_sequence_keeps_its_sizes() -> None:
    packed = pack_sequence([torch.arange(3.0), torch.arange(1.0)])
    doubled = map_batch(lambda tensor: tensor * 2, packed)
    assert isinstance(doubled, PackedSequence)
    assert doubled.data.tolist() == [0, 0, 2, 4]
    assert doubled.batch_sizes.tolist() == packed.batch_sizes.tolist()
