"""Acceptance: arguments, indices, lengths and collation are torch's. Each test runs both classes and compares."""

from __future__ import annotations

import io
import itertools
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from full_run import full_only
from pairwise import each_value, pairwise, product
from torch.utils.data import SequentialSampler
from torch_suite_support import (
    BOTH,
    FAST,
    METHODS,
    OURS,
    WORKERS,
    Lies,
    Locked,
    Many,
    MyDict,
    MyList,
    Parts,
    Point,
    Range,
    Samples,
    Shared,
    outcomes,
    shape,
)

import penstock as ps

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:Length of IterableDataset")


# 2. Refusals that `test_torch_drop_in` does not have.

BAD: list[dict[str, Any]] = [
    {"sampler": [1], "shuffle": 1},
    {"sampler": [1], "shuffle": "yes"},
    {"sampler": [1], "batch_sampler": [[1]], "shuffle": 2},
    {"batch_sampler": [[1]], "shuffle": 1},
    {"dataset": Parts([3]), "shuffle": 1},
    {"dataset": Parts([3]), "shuffle": []},
    {"dataset": Parts([3]), "sampler": []},
    {"dataset": Parts([3]), "sampler": SequentialSampler([1])},
    {"dataset": Parts([3]), "batch_sampler": []},
    {"dataset": Parts([3]), "batch_size": None, "drop_last": True},
    {"multiprocessing_context": torch.multiprocessing.get_context("fork")},
    {"multiprocessing_context": "", "num_workers": 1},
    {"multiprocessing_context": object(), "num_workers": 1},
    {"num_workers": -1, "timeout": -1},
    {"timeout": -0.5, "num_workers": 1},
    {"prefetch_factor": 0, "num_workers": 1},
]


def refusal(kind: Any, options: dict[str, Any]) -> Any:
    try:
        kind(**{"dataset": Range(9), **options})
    except Exception as error:
        return next(base for base in type(error).__mro__ if base.__module__ == "builtins"), str(error)
    return "accepted"


@pytest.mark.parametrize("options", BAD, ids=lambda options: " ".join(f"{k}={v}"[:30] for k, v in options.items()))
def test_refusals_are_torchs(options: dict[str, Any]) -> None:
    said = [refusal(kind, options) for kind in BOTH]
    if options.get("shuffle") == "yes":  # only the text differs: a shuffle with a name is ours
        said = [found[0] for found in said]
    assert said[0] == said[1]


@pytest.mark.parametrize("method", METHODS)
def test_contexts_by_name_and_as_objects(method: str) -> None:
    for context in (method, torch.multiprocessing.get_context(method)):
        loaders = [kind(Range(3), num_workers=1, multiprocessing_context=context) for kind in BOTH]
        assert loaders[0].multiprocessing_context.get_start_method() == method
        assert type(loaders[0].multiprocessing_context) is type(loaders[1].multiprocessing_context)


# 3. Without batching; samplers that are any iterable.


def values() -> list[Any]:
    return [
        3,
        2.5,
        "text",
        b"bytes",
        None,
        np.float16(1.5),
        np.int8(-3),
        np.bool_(True),
        np.arange(6, dtype=np.uint8).reshape(2, 3),
        np.array(["a", "b"]),
        torch.arange(3),
        Point(1, np.zeros(2)),
        (1, np.ones(1)),
        [1, [np.int16(2)]],
        {"a": np.zeros(1), "b": {"c": 1.0}},
        MyDict(a=np.zeros(2)),
        MyList([np.zeros(2), 1]),
        {1, 2},
    ]


@pytest.mark.parametrize("how", FAST)
def test_without_batching_samples_are_converted_as_torch_converts_them(how: str) -> None:
    data = Samples(values())
    expected = outcomes(BOTH[0](data, batch_size=None))
    assert outcomes(ps.DataLoader(data, batch_size=None, **OURS[how])) == expected


INDICES: dict[str, Any] = {
    "lists": [[0, 1], [2], [3, 4, 5]],
    "tuples": [(0, 1), (2, 3)],
    "strings": ["ab", "c"],
    "tensors": torch.arange(4),
    "array": np.arange(3),
    "range": range(2, 9, 3),
    "nothing": [],
}


@full_only("workers for each", but=["fork-nothing", "persistent-tuples", "fork-strings"])
@pytest.mark.parametrize(
    ("how", "name"),
    [*product(["inline", "thread", "threads persist"], INDICES), *each_value(["fork", "persistent"], INDICES)],
)
def test_the_index_is_whatever_the_sampler_yields(how: str, name: str) -> None:
    for batch_size in (None, 2):
        expected = outcomes(BOTH[0](Range(9), batch_size=batch_size, sampler=INDICES[name]))
        assert outcomes(ps.DataLoader(Range(9), batch_size=batch_size, sampler=INDICES[name], **OURS[how])) == expected


class Once:
    """A sampler without a length, that is its own iterator's only owner."""

    def __iter__(self) -> Any:
        yield from (4, 2, 7)


@full_only("workers for each", but=["inline", "fork"])
@pytest.mark.parametrize("how", FAST)
def test_samplers_without_a_length(how: str) -> None:
    for options in ({"batch_size": 2, "sampler": Once()}, {"batch_sampler": [[1], [], [2, 3, 4]]}):
        expected = outcomes(BOTH[0](Many(9), **options))
        assert outcomes(ps.DataLoader(Many(9), **options, **OURS[how])) == expected
    with pytest.raises(TypeError):
        len(ps.DataLoader(Range(9), sampler=Once(), **OURS[how]))


# 4. Lengths that lie.


@full_only("workers for each", but=["10-True-fork-True", "7-False-fork-False"])
@pytest.mark.parametrize(
    ("said", "drop_last", "how", "asked"),
    pairwise([0, 3, 7, 10, 40], [False, True], ["inline", "fork"], [False, True]),
)
def test_length_of_a_stream_and_its_warnings(said: int, drop_last: bool, how: str, asked: bool) -> None:
    found = []
    data = Lies(10, said)
    for kind in BOTH:
        loader = kind(data, batch_size=3, drop_last=drop_last, **WORKERS.get(how, {}))
        length = len(loader) if asked else None
        told = []
        iterator = iter(loader)
        while True:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                if next(iterator, None) is None:
                    break
            told.append([(warning.category, str(warning.message)[:25]) for warning in caught])
        found.append((length, told))
    assert found[0] == found[1]


def test_length_of_a_stream_follows_it() -> None:
    data = Lies(10, 10)
    loader: Any = ps.DataLoader(data, batch_size=3)
    assert len(loader) == 4
    data.said = 31
    assert len(loader) == 11


# 16. Collation.


def batches_to_collate(folder: Path) -> dict[str, list[Any]]:
    mapped = np.memmap(folder / "mapped", dtype=np.float32, mode="w+", shape=(4, 3))
    mapped[:] = np.arange(12).reshape(4, 3)
    scalars = {
        f"numpy {name}": [np.dtype(name).type(value) for value in (0, 1, 2)]
        for name in ("float16", "float32", "float64", "int8", "uint8", "int16", "int32", "int64", "bool", "complex64")
    }
    unsigned = {f"array {name}": [np.arange(3, dtype=name)] * 2 for name in ("uint16", "uint32", "uint64")}
    return {
        **scalars,
        **unsigned,
        "bool": [True, False],
        "int": [1, 2**40],
        "too large": [2**70, 1],
        "float and int": [1.5, 2],
        "complex": [1j, 2j],
        "text": ["a", "bc"],
        "bytes": [b"a", b"bc"],
        "empty text": ["", ""],
        "none": [None, None],
        "objects": [object(), object()],
        "object array": [np.array([object()])] * 2,
        "text array": [np.array(["a", "b"])] * 2,
        "bytes array": [np.array([b"a"])] * 2,
        "datetime": [np.datetime64("2020-01-01")] * 2,
        "zero-dim array": [np.array(3), np.array(4)],
        "zero-dim tensor": [torch.tensor(1), torch.tensor(2)],
        "empty array": [np.zeros((0, 3))] * 2,
        "empty tensor": [torch.empty(0)] * 3,
        "unequal arrays": [np.zeros(2), np.zeros(3)],
        "unequal types": [torch.zeros(2), torch.zeros(2, dtype=torch.int64)],
        "array and tensor": [np.zeros(2), torch.zeros(2)],
        "tensor and array": [torch.zeros(2), np.zeros(2)],
        "memmap": list(mapped),
        "read-only": [np.frombuffer(b"abcd", dtype=np.uint8)] * 2,
        "strided": [np.arange(12).reshape(3, 4)[:, ::2]] * 2,
        "reversed": [np.arange(4)[::-1].copy()[::1]] * 2,
        "big endian": [np.arange(3, dtype=">i4")] * 2,
        "transposed tensor": [torch.arange(6).view(2, 3).t()] * 2,
        "channels last": [torch.rand(3, 4, 4, generator=torch.Generator().manual_seed(1)).permute(1, 2, 0)] * 2,
        "needs grad": [torch.zeros(2, requires_grad=True)] * 2,
        "half": [torch.zeros(2, dtype=torch.bfloat16)] * 2,
        "sparse": [torch.eye(3).to_sparse()] * 2,
        "sparse csr": [torch.eye(3).to_sparse_csr()] * 2,
        "tuple": [(1, "a"), (2, "b")],
        "list": [[1, [2.0]], [3, [4.0]]],
        "empty list": [[], []],
        "unequal lists": [[1, 2], [3]],
        "named tuple": [Point(1, "a"), Point(2, "b")],
        "dict": [{"a": 1, "b": [2]}, {"a": 3, "b": [4]}],
        "more keys": [{"a": 1}, {"a": 2, "b": 3}],
        "fewer keys": [{"a": 1, "b": 3}, {"a": 2}],
        "empty dict": [{}, {}],
        "my dict": [MyDict(a=1), MyDict(a=2)],
        "my list": [MyList([1, 2]), MyList([3, 4])],
        "locked list": [Locked((1, 2)), Locked((3, 4))],
        "ordered": [{"b": 1, "a": 2}, {"a": 3, "b": 4}],
        "mixed": [1, "a"],
        "dict and list": [{"a": 1}, [1]],
        "range": [range(2), range(2, 4)],
        "set": [{1}, {2}],
        "bytearray": [bytearray(b"ab")] * 2,
        "file": [io.BytesIO()] * 2,
        "one": [np.ones(2)],
    }


@pytest.fixture(scope="module")
def collated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return batches_to_collate(tmp_path_factory.mktemp("collate"))


DIFFERENT = {
    "tensor and array": "torch's workers stumble on an AttributeError, ours say what torch says without workers",
    "needs grad": "torch's workers refuse to send it, ours send the values",
}


def outcome(kind: Any, batches: dict[str, list[Any]], how: dict[str, Any]) -> dict[str, Any]:
    """Return what becomes of each batch, in one pass."""
    samples = list(itertools.chain.from_iterable(batches.values()))
    places = iter(range(len(samples)))
    loader = kind(Samples(samples), batch_sampler=[[next(places) for _ in each] for each in batches.values()], **how)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dict(zip(batches, outcomes(loader), strict=True))


@full_only("workers for each", but=["inline", "fork"])
@pytest.mark.parametrize("how", FAST)
def test_collated_as_by_torch(collated: dict[str, list[Any]], how: str) -> None:
    """The same values, shapes, types and containers, or the same type of error, for each kind of sample."""
    options = OURS[how]
    in_processes = options.get("executor") == "process"
    torchs = {name: value for name, value in options.items() if name != "executor"} if in_processes else {}
    batches = {name: batch for name, batch in collated.items() if not (in_processes and name in DIFFERENT)}
    expected, found = outcome(BOTH[0], batches, torchs), outcome(ps.DataLoader, batches, options)
    assert {name: (expected[name], found[name]) for name in batches if found[name] != expected[name]} == {}


@full_only("workers for each", but=["inline", "persistent"])
@pytest.mark.parametrize("how", FAST)
def test_strides_are_torchs(how: str) -> None:
    for sample in (torch.rand(3, 4, 4).permute(1, 2, 0), torch.arange(6).view(2, 3).t(), np.zeros((2, 3)).T):
        layouts = []
        for kind, options in ((BOTH[0], {}), (ps.DataLoader, OURS[how])):
            (batch,) = kind(Samples([sample, sample]), batch_size=2, **options)
            layouts.append((batch.stride(), batch.is_contiguous()))
        assert layouts[0] == layouts[1]


@pytest.mark.parametrize("how", FAST)
def test_samples_that_share_a_storage_keep_it(how: str) -> None:
    data = Shared(9)
    found = [
        outcomes(kind(data, batch_size=3, **options)) for kind, options in ((BOTH[0], {}), (ps.DataLoader, OURS[how]))
    ]
    assert found[0] == found[1]
    base = torch.arange(12).view(3, 4)
    batch = next(iter(ps.DataLoader([base[0], base[1]], batch_size=2)))  # type: ignore[arg-type]
    batch += 1
    assert base.tolist() == torch.arange(12).view(3, 4).tolist()
    assert base.untyped_storage().nbytes() == 96


@pytest.mark.parametrize("how", FAST)
def test_batches_can_be_written_to(how: str) -> None:
    data = Samples([np.frombuffer(b"abcd", dtype=np.uint8)] * 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = list(ps.DataLoader(data, batch_size=2, **OURS[how]))
    made[0] += 1
    assert made[0].tolist() == [[98, 99, 100, 101]] * 2
    assert made[1].tolist() == [[97, 98, 99, 100]] * 2


@pytest.mark.parametrize("how", FAST)
def test_getitems_is_used_as_by_torch(how: str) -> None:
    expected = [shape(batch) for batch in BOTH[0](Many(7), batch_size=3)]
    assert [shape(batch) for batch in ps.DataLoader(Many(7), batch_size=3, **OURS[how])] == expected
    expected = [shape(batch) for batch in BOTH[0](Many(4), batch_size=None)]
    assert [shape(batch) for batch in ps.DataLoader(Many(4), batch_size=None, **OURS[how])] == expected


# What other people's programs ask of a loader's parts.


def test_samplers_are_of_torchs_types() -> None:
    """Lightning and Accelerate ask before they deal samples to ranks: by other types they deal twice, or not at all."""
    for options in ({}, {"shuffle": True}):
        loaders = [kind(Range(9), batch_size=2, **options) for kind in BOTH]
        assert isinstance(loaders[1].sampler, type(loaders[0].sampler))
        assert type(loaders[1].batch_sampler) is type(loaders[0].batch_sampler)
    for name in ("RandomSampler", "SequentialSampler", "DistributedSampler", "WeightedRandomSampler", "BatchSampler"):
        assert issubclass(getattr(ps, name), getattr(torch.utils.data, name)), name


def test_a_generator_that_is_assigned_to_the_sampler_is_used() -> None:
    orders = []
    for kind in BOTH:
        loader = kind(Range(30), batch_size=30, shuffle=True)
        loader.sampler.generator = torch.Generator().manual_seed(4)
        orders.append([batch.tolist() for _ in range(2) for batch in loader])
    assert orders[0] == orders[1]


def test_length_is_that_of_an_epoch_wherever_the_consumer_is() -> None:
    loader: Any = ps.DataLoader(Range(10), batch_size=2, shuffle=True, seed=1)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    loader.load_state_dict(state)
    assert len(loader) == 5
    assert len(list(loader)) == 4
    assert len(loader) == 5


@pytest.mark.parametrize("workers", [0, 2])
def test_setting_the_epoch_that_has_begun_loses_no_position(workers: int) -> None:
    """Lightning calls ``iter()``, then the sampler's ``set_epoch``; and after a resume that may be another epoch."""
    make: Any = lambda: ps.DataLoader(Range(10), batch_size=2, shuffle=True, seed=1, num_workers=workers)  # noqa: E731
    loader, whole = make(), make()
    iterator = iter(loader)
    loader.sampler.set_epoch(0)
    had = [next(iterator).tolist() for _ in range(2)]
    resumed = make()
    resumed.load_state_dict(loader.state_dict())
    assert had + [batch.tolist() for batch in resumed] == [batch.tolist() for batch in whole]
    iterator = iter(resumed)
    resumed.sampler.set_epoch(4)
    whole.set_epoch(4)
    assert [batch.tolist() for batch in iterator] == [batch.tolist() for batch in whole]
