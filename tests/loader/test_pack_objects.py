"""Batches between processes: arrays, and objects of all kinds with tensors in them."""

from __future__ import annotations

import pickle
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from pack_support import ROOM, assert_same, slot_of, travel

from penstock.loader.executors.process.transport import pack, unpack

Point = namedtuple("Point", ["x", "y"])


@pytest.fixture(params=ROOM, name="room")
def _room(request: pytest.FixtureRequest) -> int | None:
    return ROOM[request.param]


def test_arrays_of_every_kind(room: int | None) -> None:
    base = np.arange(24_000, dtype=np.int32).reshape(30, 40, 20)
    fixed = base.copy()
    fixed.flags.writeable = False
    arrays = {
        "C": base,
        "Fortran": np.asfortranarray(base),
        "reversed": base[::-1, :, ::-1],
        "reversed line": np.arange(5000)[::-1],
        "cut": base[3:20, ::2, 5],
        "spread": np.broadcast_to(np.arange(3), (1000, 3)),
        "no dimension": np.array(5),
        "a moment": np.array("2026-01-01", "M8[D]"),
        "moments": np.arange("2020", "2023", dtype="M8[D]"),
        "spans": np.arange(3000).astype("m8[ms]"),
        "foreign order": base.astype(">i4"),
        "structured": np.zeros(2000, [("a", "u1"), ("b", "<f8", (2,))]),
        "aligned": np.zeros(2000, np.dtype([("a", "u1"), ("b", "f8")], align=True)),
        "text": np.array(["é", "ab"] * 1000),
        "bytes": np.array([b"ab", b"c"] * 2000),
        "nothing": np.zeros((3, 0)),
        "no bytes": np.zeros(3, "S0"),
        "objects": np.array([1, "a", None], object),
        "objects within": np.array([(1, "a")], [("n", int), ("o", object)]),
        "half": base.astype(np.float16),
        "long": base.astype(np.longdouble),
        "complex": base.astype(complex),
        "read-only": fixed,
        "masked": np.ma.masked_array(base, base % 2 == 0),
        "records": np.zeros(2000, [("a", "u1")]).view(np.recarray),
    }
    for name, array in arrays.items():
        ours = travel(array, room)[0]
        assert type(ours) is type(array), name
        assert (ours.dtype, ours.shape) == (array.dtype, array.shape), name
        if array.dtype.hasobject:
            assert ours.tolist() == array.tolist()
        else:
            assert ours.tobytes() == array.tobytes(), name
    assert travel(arrays["Fortran"], room)[0].flags.f_contiguous
    ours = travel(fixed, room)[0]
    ours[0] = 1  # arrives writable, as in torch
    ours, _ = travel([base, base], room)
    assert ours[0] is ours[1]


@pytest.mark.skipif(not hasattr(np.dtypes, "StringDType"), reason="NumPy 1")
def test_strings_of_numpy(room: int | None) -> None:
    array = np.array(["a" * 100, "é", ""] * 500, dtype=np.dtypes.StringDType())
    assert travel(array, room)[0].tolist() == array.tolist()


def test_a_memmap(tmp_path: Any, room: int | None) -> None:
    array = np.memmap(tmp_path / "a", np.int64, "w+", shape=(3000,))
    array[:] = np.arange(3000)
    assert travel(array, room)[0].tolist() == list(range(3000))


@given(npst.arrays(npst.scalar_dtypes(), npst.array_shapes(min_dims=0, max_side=6, min_side=0)), st.booleans())
def test_any_array(array: np.ndarray[Any, Any], transposed: bool) -> None:
    array = array.T if transposed else array
    for room in ROOM.values():
        ours = travel(array, room)[0]
        assert (ours.shape, ours.tobytes()) == (array.shape, array.tobytes())
        assert ours.dtype == array.dtype or not array.nbytes  # NumPy loses the byte order of empty dates


@dataclass
class Box:
    size: torch.Tensor
    name: str


class Odd:
    """State that Python does not look into."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> Any:
        return Odd, (self.tensor * 1,)


LEAVES = st.one_of(
    st.integers(),
    st.floats(),
    st.text(),
    st.binary(),
    st.none(),
    st.sampled_from([0, 1, 600, 2000]).map(lambda n: torch.arange(float(n))),
    st.sampled_from([1, 600, 2000]).map(lambda n: np.arange(n)),
)


@given(
    st.recursive(
        LEAVES,
        lambda inner: st.one_of(
            st.lists(inner, max_size=4),
            st.tuples(inner, inner).map(lambda pair: Point(*pair)),
            st.dictionaries(st.text(max_size=3), inner, max_size=3),
        ),
        max_leaves=12,
    ),
    st.sampled_from(list(ROOM.values())),
)
def test_any_batch(batch: Any, room: int | None) -> None:
    assert_same(travel(batch, room)[0], batch)


def test_objects(room: int | None) -> None:
    tensor = torch.arange(2000.0)
    box = Box(tensor, "a")
    batch = {"box": box, "again": box, "tensor": tensor, "ordered": OrderedDict(b=1, a=tensor), "odd": Odd(tensor)}
    batch["itself"] = batch
    ours, cost = travel(batch, room)
    assert ours["box"] is ours["again"]
    assert ours["box"].size is ours["tensor"]
    assert ours["itself"] is ours
    assert list(ours["ordered"]) == ["b", "a"]
    assert torch.equal(ours["odd"].tensor, tensor)
    assert 2 * tensor.nbytes < cost < 2 * tensor.nbytes + 2000
    packed_sequence = torch.nn.utils.rnn.pack_sequence([torch.arange(2000.0), torch.arange(3.0)])
    assert_same(travel(packed_sequence, room)[0], packed_sequence)
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        travel([tensor, lambda: 0], room)


def test_an_incomplete_pickle_is_an_error() -> None:
    slot = slot_of()
    data = pack([torch.zeros(2000)], slot)
    with pytest.raises((EOFError, pickle.UnpicklingError)):
        unpack(data[:-5], np.zeros(8000, np.uint8))
