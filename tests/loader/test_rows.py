"""Batches in chunks: rows come together as if one had collated the whole."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from full_run import full_only
from hypothesis import given, settings
from hypothesis import strategies as st
from pack_support import assert_same
from process_support import KINDS, Pair, Samples, Triple
from torch.utils.data import Dataset, default_collate, get_worker_info

from penstock import DataLoader
from penstock.loader.arena import Rows, collating_into
from penstock.loader.collate import collate
from penstock.loader.executors.process.rows import Layout, flatten, join, join_texts, layout_of, unflatten

FIXED = st.one_of(
    st.just(lambda i: i),
    st.just(lambda i: i / 2),
    st.just(lambda i: i % 2 == 0),
    st.just(lambda i: f"text {i}"),
    st.just(lambda i: b"bytes %d" % i),
    st.just(lambda i: np.float32(i)),
    st.just(lambda i: np.full((2, 3), i, np.int16)),
    st.just(lambda i: np.array(i, np.uint8)),
    st.just(lambda i: torch.full((3, 2, 2), i)),
    st.just(lambda i: torch.tensor(i)),
    st.just(lambda i: torch.full((4, 5, 3), i, dtype=torch.uint8).permute(2, 0, 1)),
    st.just(lambda i: torch.full((1, 1, 3), i).permute(2, 0, 1)),
    st.just(lambda i: torch.full((5, 4), i, dtype=torch.bfloat16).t()),
)
"""Leaves that look the same in every sample."""

LOOSE = st.one_of(
    st.just(lambda i: i if i % 3 else i / 2),
    st.just(lambda i: torch.zeros(0, 2)),
    st.just(lambda i: torch.full((2,), i, dtype=torch.int32 if i % 5 else torch.float32)),
    st.just(lambda i: {}),
    st.just(lambda i: ()),
)
"""Leaves whose chunks do not fit together, or have no rows."""


def nest(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: lambda i: [part(i) for part in parts]),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: lambda i: tuple(part(i) for part in parts)),
        st.tuples(inner, inner).map(lambda parts: lambda i: Pair(parts[0](i), parts[1](i))),
        st.dictionaries(st.sampled_from("abc"), inner, min_size=1, max_size=3).map(
            lambda parts: lambda i: {key: part(i) for key, part in parts.items()}
        ),
    )


SAMPLES = st.recursive(FIXED, nest, max_leaves=6)
ANY_SAMPLES = st.recursive(st.one_of(FIXED, LOOSE), nest, max_leaves=6)


def cuts_of(size: int, count: int) -> list[tuple[int, int]]:
    return [(part * size // count, (part + 1) * size // count) for part in range(count)]


@given(SAMPLES, st.integers(1, 9))
def test_unflatten_undoes_flatten(make: Any, size: int) -> None:
    batch = collate([make(i) for i in range(size)])
    tensors: list[torch.Tensor] = []
    texts: list[Any] = []
    spec = flatten(batch, tensors, texts)
    assert spec is not None
    assert all(tensor.is_contiguous() for tensor in tensors)
    ours = unflatten(spec, list(tensors), list(texts))
    assert_same(ours, batch)
    assert not tensors or layout_of(batch, size) is not None
    assert layout_of(batch, size + 1) is None


@given(ANY_SAMPLES, st.integers(1, 12), st.integers(1, 4))
def test_chunks_joined_are_the_whole(make: Any, size: int, count: int) -> None:
    """Or they are not joined."""
    cuts = cuts_of(size, min(size, count))
    samples = [make(i) for i in range(size)]
    joined = join([collate(samples[begin:end]) for begin, end in cuts], [end - begin for begin, end in cuts])
    if joined is not None:
        assert_same(joined[0], default_collate(samples))
        assert layout_of(joined[0], size) == joined[1]


def write_chunks(layout: Layout, samples: list[Any], count: int) -> Any | None:
    """As the workers and the assembly do it."""
    size = len(samples)
    columns = layout.columns(size)
    memory = np.zeros(layout.nbytes(size), np.uint8)
    found = []
    for begin, end in cuts_of(size, count):
        rows = Rows(memory, columns, begin, end)
        with collating_into(rows):
            batch = collate(samples[begin:end])
        tensors: list[torch.Tensor] = []
        texts: list[Any] = []
        if flatten(batch, tensors, texts) != layout.spec or any(len(text) != end - begin for text in texts):
            return None
        if len(rows.addresses) != len(layout.rows) or [t.data_ptr() for t in tensors] != rows.addresses:
            return None
        found.append(texts)
    tensors = [
        torch.frombuffer(memory, dtype=c.dtype, offset=c.offset, count=size * c.row_bytes // c.dtype.itemsize)
        for c in columns
    ]
    tensors = [tensor.view(size, *column.row) for tensor, column in zip(tensors, columns, strict=True)]
    return unflatten(layout.spec, tensors, join_texts(found))


@given(ANY_SAMPLES, st.integers(1, 12), st.integers(1, 12), st.integers(1, 4), st.integers(0, 20))
def test_rows_in_shared_memory_are_the_whole(make: Any, known: int, size: int, count: int, first: int) -> None:
    """The layout is of another batch; what does not fit it is not put together."""
    layout = layout_of(collate([make(i) for i in range(known)]), known)
    if layout is None:
        return
    samples = [make(first + i) for i in range(size)]
    batch = write_chunks(layout, samples, min(count, size))
    if batch is not None:
        assert_same(batch, default_collate(samples))


@given(SAMPLES, st.integers(1, 12), st.integers(1, 12), st.integers(1, 4))
def test_what_always_looks_the_same_always_fits(make: Any, known: int, size: int, count: int) -> None:
    layout = layout_of(collate([make(i) for i in range(known)]), known)
    if layout is not None:
        assert write_chunks(layout, [make(i) for i in range(size)], min(count, size)) is not None


@given(st.lists(SAMPLES, min_size=2, max_size=2), st.integers(1, 6), st.integers(1, 3))
def test_other_batches_do_not_pass_for_this_one(makes: list[Any], size: int, count: int) -> None:
    layout = layout_of(collate([makes[0](i) for i in range(size)]), size)
    samples = [makes[1](i) for i in range(size)]
    batch = None if layout is None else write_chunks(layout, samples, min(count, size))
    if batch is not None:
        assert_same(batch, default_collate(samples))


def test_columns_do_not_overlap() -> None:
    batch = collate([(1, np.zeros(3, np.uint8), 2.0, torch.zeros(5, dtype=torch.int16), "a")] * 7)
    layout = layout_of(batch, 7)
    assert layout is not None
    for count in (1, 7, 100):
        columns = layout.columns(count)
        ends = [column.offset + count * column.row_bytes for column in columns]
        assert all(column.offset % 64 == 0 for column in columns)
        assert all(end <= column.offset for end, column in zip(ends, columns[1:], strict=False))
        assert ends[-1] <= layout.nbytes(count) < ends[-1] + 64


def test_only_what_looks_like_its_column_is_given_rows() -> None:
    layout = layout_of(collate([(torch.zeros(3), 1)] * 4), 4)
    assert layout is not None
    rows = Rows(np.zeros(layout.nbytes(4), np.uint8), layout.columns(4), 1, 3)
    for shape, dtype in (((3, 3), torch.float32), ((2, 3), torch.float64), ((2,), torch.float32), ((), torch.float32)):
        assert rows.empty(shape, dtype) is None
    assert rows.addresses == []
    assert rows.empty((2, 3), torch.float32) is not None
    assert rows.empty((2, 3), torch.float32) is None
    assert rows.empty((2,), torch.int64) is not None
    assert rows.empty((2,), torch.int64) is None


@pytest.mark.parametrize(
    "batch",
    [
        torch.tensor(1),
        [torch.zeros(2, 3), 5],
        OrderedDict(a=torch.zeros(2)),
        {"a": None, "b": torch.zeros(2)},
        torch.zeros(2, requires_grad=True),
        torch.eye(2).to_sparse(),
        torch.zeros(2, 3, dtype=torch.complex64).conj(),
        torch._neg_view(torch.zeros(2, 3)),
        torch.zeros(3, 2).t(),
        torch.zeros(2, 2).t(),
        torch.zeros(2, 3)[:, ::2],
        torch.zeros(1).expand(2),
        torch.zeros(2, 0),
        ["a", "b"],
        [],
        {},
        torch.nn.Parameter(torch.zeros(2)),
        [torch.zeros(2), np.zeros(2)],
        [torch.zeros(2), ["a", "b", "c"]],
    ],
    ids=repr,
)
def test_what_has_no_rows(batch: Any) -> None:
    assert layout_of(batch, 2) is None
    assert join([batch, batch], [2, 2]) is None


def test_chunks_of_other_kinds_are_not_joined() -> None:
    base = {"a": torch.zeros(2, 3), "b": ["x", "y"]}
    others = [
        {"b": ["x", "y"], "a": torch.zeros(2, 3)},
        {"a": torch.zeros(2, 3), "b": ("x", "y")},
        {"a": torch.zeros(2, 4), "b": ["x", "y"]},
        {"a": torch.zeros(2, 3, dtype=torch.int64), "b": ["x", "y"]},
        {"a": torch.zeros(3, 2).t(), "b": ["x", "y"]},
        [torch.zeros(2, 3), ["x", "y"]],
        Pair(torch.zeros(2, 3), ["x", "y"]),
        None,
    ]
    assert join([base, base], [2, 2]) is not None
    for other in others:
        assert join([base, other], [2, 2]) is None
        assert join([other, base], [2, 2]) is None
    pair, triple = Pair(torch.zeros(2), torch.zeros(2)), Triple(torch.zeros(2), torch.zeros(2), torch.zeros(2))
    assert join([pair, triple], [2, 2]) is None
    assert join([pair, list(pair)], [2, 2]) is None


# Through a loader of two processes.


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_samples_of_chunks_that_do_not_fit_together_are_counted_once() -> None:
    with DataLoader(Samples("mixed numbers", 14), 7, num_workers=2, dispatch="chunk") as loader:
        assert len(list(loader)) == 2
        assert loader.stats()["samples"] == 14


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_messages_of_chunks_that_do_not_fit_together_are_not_those_of_the_batch() -> None:
    """Else such a batch seems twice as large, and fewer are in flight."""
    smallest = []
    for dispatch in ("batch", "chunk"):
        with DataLoader(Samples("mixed numbers", 14), 7, num_workers=2, dispatch=dispatch) as loader:
            iterator: Any = iter(loader)
            sizes = iterator._batches.executor._plan.messages
            assert len(list(iterator)) == 2
            smallest.append(min(sizes._last))
    assert smallest[1] < 1.5 * smallest[0]


@full_only(
    "workers for each",
    but=[
        "nothing-2",
        "grows-2",
        "mixed numbers-2",
        "sparse and not-1",
        "ordered-1",
        "sometimes images-1",
        "tensor-2",
        "dict-2",
    ],
)
@pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:more than")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", KINDS)
def test_chunks_equal_one_process(name: str, threads: int) -> None:
    data = Samples(name, 50)
    expected = list(DataLoader(data, 8, executor="inline"))
    loader = DataLoader(
        *(data, 8),
        executor="process",
        num_workers=2,
        threads_per_worker=threads,
        dispatch="chunk",
    )
    with loader:
        batches = list(loader)
        assert_same(batches, expected)
    for ours, theirs in zip(batches, expected, strict=True):
        assert strides(ours) == strides(theirs)


def strides(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.stride()
    if isinstance(batch, dict):
        return {key: strides(value) for key, value in batch.items()}
    return [strides(part) for part in batch] if isinstance(batch, list | tuple) else None


@pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:more than")
@settings(max_examples=5)
@given(st.lists(st.sampled_from([*KINDS]), min_size=2, max_size=4))
def test_data_that_change_their_kind(names: list[str]) -> None:
    data = Samples("/".join(names), 8 * len(names))
    expected = list(DataLoader(data, 4, executor="inline"))
    loader = DataLoader(data, 4, executor="process", num_workers=2, dispatch="chunk")
    assert_same(list(loader), expected)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("name", ["unequal", "text or none"])
def test_what_fails_fails_as_in_one_process(name: str) -> None:
    data = Samples(name, 16)

    def run(**options: Any) -> list[str]:
        found = []
        batches = iter(DataLoader(data, 8, **options))
        for _ in range(2):
            try:
                found.append(repr(next(batches)))
            except Exception as error:
                found.append(f"{type(error).__name__}: {str(error).strip().splitlines()[-1].split(': ', 1)[-1]}")
        return found

    assert run(executor="process", num_workers=2, dispatch="chunk") == run(executor="inline")


class Who(Dataset[int]):
    """Which worker makes a sample."""

    pure = True

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        info = get_worker_info()
        assert info is not None
        return info.id


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [2, 3])
def test_each_worker_makes_a_chunk_of_the_first_batch(workers: int) -> None:
    loader = DataLoader(Who(), 6, num_workers=workers, dispatch="chunk")
    assert next(iter(loader)).tolist() == [number for number in range(workers) for _ in range(6 // workers)]
