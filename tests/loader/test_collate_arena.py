"""The default collate function against torch's: values, types, errors; with memory to write into, and without."""

from __future__ import annotations

import collections
import multiprocessing
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from busy_support import HANG
from full_run import full_only
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from pack_support import DTYPES, assert_same, collating_into, content, slot_of
from process_support import Pair
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from penstock.loader.collate import Collate, collate, is_default

pytestmark = [pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")]

ROOM = [1 << 20, 8192, None]


class Bag(dict[str, Any]):
    """A dict with a property."""

    colour = "red"


class Row(list[Any]):
    colour = "red"


class Fixed(collections.UserList[Any]):
    pass


class Labelled(torch.Tensor):
    pass


SAMPLES: dict[str, Callable[[], list[Any]]] = {
    "ints": lambda: [1, 2, 3],
    "large ints": lambda: [2**62, -(2**63)],
    "too large": lambda: [2**63, 1],
    "much too large": lambda: [2**64],
    "floats": lambda: [1.5, float("nan"), float("inf")],
    "ints and floats": lambda: [1, 2.5],
    "floats and ints": lambda: [1.5, 2],
    "bools": lambda: [True, False],
    "bools and ints": lambda: [True, 2],
    "text": lambda: ["a", "b"],
    "bytes": lambda: [b"a", b"b"],
    "text and others": lambda: ["a", None, 3],
    "None": lambda: [None, None],
    "int and None": lambda: [1, None],
    "float and None": lambda: [1.0, None],
    "complex": lambda: [1j, 2j],
    "fractions": lambda: [Fraction(1, 2)] * 2,
    "objects": lambda: [object(), object()],
    "sets": lambda: [{1}, {2}],
    "tuples": lambda: [(1, "a"), (2, "b")],
    "lists": lambda: [[1, "a"], [2, "b"]],
    "nothing in them": lambda: [(), ()],
    "no lists": lambda: [[], []],
    "no dicts": lambda: [{}, {}],
    "unequal lists": lambda: [[1, 2], [3]],
    "unequal tuples": lambda: [(1, 2), (3,)],
    "list and int": lambda: [[1, 2], 3],
    "dicts": lambda: [{"a": 1, "b": [2.0]}, {"b": [3.0], "a": 4}],
    "missing key": lambda: [{"a": 1}, {"b": 1}],
    "more keys": lambda: [{"a": 1}, {"a": 2, "b": 1}],
    "dict and int": lambda: [{"a": 1}, 3],
    "named tuples": lambda: [Pair(1, "a"), Pair(2, "b")],
    "ordered": lambda: [collections.OrderedDict(b=1, a=2)] * 2,
    "default dicts": lambda: [collections.defaultdict(int, a=1)] * 2,
    "bags": lambda: [Bag(a=1), Bag(a=2)],
    "rows": lambda: [Row([1, 2]), Row([3, 4])],
    "user dicts": lambda: [collections.UserDict(a=1)] * 2,
    "user lists": lambda: [Fixed([1, 2])] * 2,
    "deques": lambda: [collections.deque([1, 2])] * 2,
    "fixed dicts": lambda: [MappingProxyType({"a": 1})] * 2,
    "ranges": lambda: [range(3), range(3)],
    "byte arrays": lambda: [bytearray(b"ab"), bytearray(b"cd")],
    "bool arrays": lambda: [np.array([True]), np.array([False])],
    "foreign order": lambda: [np.arange(3, dtype=">i4")] * 2,
    "foreign and own order": lambda: [np.arange(3, dtype="<i4"), np.arange(3, dtype=">i4")],
    "uint16": lambda: [np.arange(3, dtype=np.uint16)] * 2,
    "uint32": lambda: [np.arange(3, dtype=np.uint32)] * 2,
    "uint64": lambda: [np.arange(3, dtype=np.uint64) + 2**63] * 2,
    "long doubles": lambda: [np.arange(3, dtype=np.longdouble)] * 2,
    "complex arrays": lambda: [np.arange(3, dtype=np.complex64)] * 2,
    "moments": lambda: [np.array("2020", "M8[D]")] * 2,
    "structures": lambda: [np.zeros(2, [("a", "u1")])] * 2,
    "records": lambda: [np.zeros(2, [("a", "u1")]).view(np.recarray)] * 2,
    "object arrays": lambda: [np.array([1, "a"], object)] * 2,
    "string arrays": lambda: [np.array(["a", "b"])] * 2,
    "byte strings": lambda: [np.array([b"a"])] * 2,
    "void": lambda: [np.zeros(2, "V3")] * 2,
    "unequal arrays": lambda: [np.zeros(3), np.zeros(4)],
    "arrays that broadcast": lambda: [np.zeros((3, 1)), np.zeros((3, 4))],
    "dimensions": lambda: [np.zeros(3), np.zeros((3, 1))],
    "mixed arrays": lambda: [np.zeros(3, np.float32), np.ones(3, np.int64)],
    "array and None": lambda: [np.zeros(3), None],
    "array and list": lambda: [np.zeros(3), [1.0, 2.0, 3.0]],
    "array and number": lambda: [np.array(1.0), 2.0],
    "array and scalar": lambda: [np.array(1.0), np.float64(2)],
    "array and tensor": lambda: [np.zeros(3), torch.ones(3)],
    "tensor and array": lambda: [torch.ones(3), np.zeros(3)],
    "no dimension": lambda: [np.array(5), np.array(6)],
    "empty arrays": lambda: [np.zeros((0, 3))] * 2,
    "Fortran": lambda: [np.asfortranarray(np.arange(6.0).reshape(2, 3))] * 2,
    "cut": lambda: [np.arange(24).reshape(4, 6)[::2, 1::2]] * 2,
    "spread": lambda: [np.broadcast_to(np.arange(3), (2, 3))] * 2,
    "read-only": lambda: [_fixed(np.arange(3))] * 2,
    "masked": lambda: [np.ma.masked_array([1, 2], [0, 1])] * 2,
    "matrices": lambda: [np.matrix([[1, 2]])] * 2,
    "scalars": lambda: [np.float32(1), np.float32(2)],
    "scalars of types": lambda: [np.int8(1), np.float64(2.5)],
    "bool scalars": lambda: [np.bool_(True), np.bool_(False)],
    "half scalars": lambda: [np.float16(1)] * 2,
    "uint64 scalars": lambda: [np.uint64(2**63)] * 2,
    "string scalars": lambda: [np.str_("a"), np.str_("b")],
    "moment scalars": lambda: [np.datetime64("2020")] * 2,
    "tensors": lambda: [torch.zeros(3, 2), torch.ones(3, 2)],
    "no tensors": lambda: [torch.zeros(0, 2)] * 2,
    "unequal tensors": lambda: [torch.zeros(3), torch.zeros(4)],
    "unequal images": lambda: [torch.zeros(4, 5, 3).permute(2, 0, 1), torch.zeros(5, 4, 3).permute(2, 0, 1)],
    "images and matrix": lambda: [torch.zeros(4, 5, 3).permute(2, 0, 1), torch.zeros(4, 5)],
    "images and None": lambda: [torch.zeros(4, 5, 3).permute(2, 0, 1), None],
    "mixed tensors": lambda: [torch.zeros(3), torch.ones(3, dtype=torch.int64), torch.ones(3, dtype=torch.float64)],
    "tensor and None": lambda: [torch.zeros(3), None],
    "tensor and number": lambda: [torch.tensor(1.0), 2.0],
    "conjugates": lambda: [torch.ones(300, dtype=torch.complex64).mul(1j).conj()] * 2,
    "negatives": lambda: [torch.ones(300, dtype=torch.complex64).mul(1j).conj().imag] * 2,
    "conjugate rows": lambda: list(torch.ones(2, 300, dtype=torch.complex64).mul(1j).conj()),
    "negative rows": lambda: list(torch._neg_view(torch.ones(2, 300))),
    "expanded": lambda: [torch.ones(1).expand(300)] * 2,
    "transposed": lambda: [torch.arange(6).view(2, 3).t()] * 2,
    "leaves": lambda: [torch.ones(3, requires_grad=True)] * 2,
    "one leaf": lambda: [torch.ones(3), torch.ones(3, requires_grad=True)],
    "parameters": lambda: [torch.nn.Parameter(torch.ones(3))] * 2,
    "subclass": lambda: [torch.ones(3).as_subclass(Labelled)] * 2,
    "tensor and subclass": lambda: [torch.ones(3), torch.ones(3).as_subclass(Labelled)],
    "sparse": lambda: [torch.eye(3).to_sparse()] * 2,
    "CSR": lambda: [torch.eye(3).to_sparse_csr()] * 2,
    "dense and sparse": lambda: [torch.eye(3), torch.eye(3).to_sparse()],
    "nested": lambda: [torch.nested.nested_tensor([torch.zeros(3), torch.zeros(2)])] * 2,
    "meta": lambda: [torch.empty(3, device="meta")] * 2,
    "and meta": lambda: [torch.empty(3), torch.empty(3, device="meta")],
    "one": lambda: [{"a": (torch.zeros(3), np.zeros(3), 1, "x")}],
    "deep": lambda: [{"a": [Pair({"b": (i, [float(i), f"{i}"])}, np.full(3, i))]} for i in range(5)],
}


META = ("meta", "and meta")


def _fixed(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array.flags.writeable = False
    return array


def outcome(function: Callable[[list[Any]], Any], samples: list[Any]) -> tuple[Any, Exception | None]:
    try:
        return function(samples), None
    except Exception as error:
        return None, error


def assert_same_structure(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    if isinstance(theirs, torch.Tensor) and theirs.device.type == "meta":
        assert (ours.shape, ours.device) == (theirs.shape, theirs.device)
    elif isinstance(theirs, collections.abc.Mapping):
        assert list(ours) == list(theirs)
        for key in theirs:
            assert_same_structure(ours[key], theirs[key])
        assert getattr(ours, "default_factory", None) == getattr(theirs, "default_factory", None)
    elif isinstance(theirs, list | tuple | collections.UserList | collections.deque):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_same_structure(one, other)
    else:
        assert_same(ours, theirs)


def assert_as_torch(samples: list[Any], room: int | None) -> Any:
    theirs, their_error = outcome(default_collate, samples)
    with collating_into(None if room is None else slot_of(room)):
        ours, our_error = outcome(collate, samples)
    assert type(our_error) is type(their_error), our_error
    if their_error is not None:
        assert str(our_error).splitlines()[:1] == str(their_error).splitlines()[:1]
    else:
        assert_same_structure(ours, theirs)
    return ours


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("room", ROOM)
def test_quantised_as_torch(room: int | None) -> None:
    samples = [torch.quantize_per_tensor(torch.full((3,), value), 0.1, 3, torch.quint8) for value in (0.5, 1.0)]
    theirs = default_collate(samples)
    slot = None if room is None else slot_of(room)
    with collating_into(slot):
        ours = collate(samples)
    assert slot is None or not slot.used  # over memory that is given there are no such tensors: torch crashes
    assert (ours.is_quantized, ours.q_scale()) == (True, theirs.q_scale())
    assert torch.equal(ours.int_repr(), theirs.int_repr())


@full_only("imports SymPy")
def test_tensors_without_content_as_torch() -> None:
    """In a process of its own: torch imports 800 modules for them, which every later fork would take along."""

    def check() -> None:
        for name in META:
            for room in ROOM:
                test_as_torch(name, room)

    child = multiprocessing.get_context("fork").Process(target=check)
    child.start()
    try:
        child.join(HANG)
        assert child.exitcode == 0
    finally:
        child.kill()


@pytest.mark.parametrize("room", ROOM)
@pytest.mark.parametrize("name", [name for name in SAMPLES if name not in META])
def test_as_torch(name: str, room: int | None) -> None:
    assert_as_torch(SAMPLES[name](), room)
    samples = SAMPLES[name]()
    assert_as_torch([{"x": sample, "y": 1} for sample in samples], room)
    assert_as_torch([(2.5, sample) for sample in samples], room)


@pytest.mark.parametrize("room", ROOM)
def test_arrays_of_negative_strides_work_here(room: int | None) -> None:
    with collating_into(None if room is None else slot_of(room)):
        assert collate([np.arange(3)[::-1]] * 2).tolist() == [[2, 1, 0]] * 2


@pytest.mark.parametrize("room", ROOM)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type(dtype: torch.dtype, room: int | None) -> None:
    for shape in ((), (3,), (0, 2), (2, 3, 4)):
        assert_as_torch([each.clone() for each in content((3, *shape), dtype)], room)


@pytest.mark.parametrize("room", ROOM)
def test_a_memmap(tmp_path: Path, room: int | None) -> None:
    array = np.memmap(tmp_path / "a", np.int64, "w+", shape=(10, 30))
    array[:] = np.arange(300).reshape(10, 30)
    assert_as_torch(list(array), room)
    assert_as_torch([array[1], np.asarray(array[2])], room)
    assert_as_torch(list(array[0, :4]), room)


@given(
    npst.array_dtypes() | npst.scalar_dtypes(),
    npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
    st.integers(1, 4),
    st.sampled_from(ROOM),
    st.data(),
)
def test_any_arrays(dtype: Any, shape: Any, count: int, room: int | None, data: st.DataObject) -> None:
    arrays = data.draw(npst.arrays(dtype, (count, *shape)))
    assert_as_torch([arrays[(i, ...)] for i in range(count)], room)


NUMBERS = st.one_of(
    st.integers(-(2**65), 2**65),
    st.floats(),
    st.booleans(),
    st.sampled_from([np.int8(3), np.float32(2.5), np.float16(1), np.bool_(True), np.uint32(7), np.complex64(1j), None]),
)


@given(st.lists(NUMBERS, min_size=1, max_size=4), st.sampled_from(ROOM))
def test_any_numbers(numbers: list[Any], room: int | None) -> None:
    assert_as_torch(numbers, room)


@given(
    st.lists(st.integers(0, 4), min_size=3, max_size=3),
    st.permutations([0, 1, 2]),
    st.lists(st.booleans(), min_size=1, max_size=4),
    st.sampled_from(ROOM),
)
def test_any_images(shape: list[int], order: list[int], contiguous: list[bool], room: int | None) -> None:
    images = [each.clone().permute(order) for each in content((len(contiguous), *shape), torch.float32)]
    assert_as_torch([one.contiguous() if flag else one for one, flag in zip(images, contiguous, strict=True)], room)


def test_what_fits_is_in_the_slot() -> None:
    slot = slot_of()
    samples = [{"t": torch.full((30, 20), i), "a": np.full((7, 5), i), "n": i, "f": float(i)} for i in range(8)]
    with collating_into(slot):
        batch = collate(samples)
    used = slot.used
    for tensor in batch.values():
        offset = slot.put(tensor.data_ptr(), tensor.nbytes, tensor.numpy)
        assert offset is not None
        assert offset % 64 == 0
    assert slot.used == used
    with collating_into(slot), pytest.raises(RuntimeError, match="equal size"):
        collate([torch.zeros(3), torch.zeros(4)])
    assert_same_structure(batch, default_collate(samples))
    assert slot.used - used <= 64


def test_images_stay_channels_last_in_the_slot() -> None:
    slot = slot_of()
    image = content((9, 8, 3), torch.uint8).permute(2, 0, 1)
    with collating_into(slot):
        batch = Collate(channels_last=True)([image] * 4)
    assert batch.is_contiguous(memory_format=torch.channels_last)
    assert slot.put(batch.data_ptr(), batch.nbytes, batch.numpy) == 0
    assert torch.equal(batch, default_collate([image] * 4))


def test_scopes_nest_and_end() -> None:
    outer, inner = slot_of(), slot_of()
    with collating_into(outer):
        with pytest.raises(ZeroDivisionError), collating_into(inner):
            collate([torch.zeros(3)])
            _ = 1 / 0
        assert (outer.used, inner.used) == (0, 12)
        with collating_into(None):
            collate([torch.zeros(3)])
        assert outer.used == 0
        collate([torch.zeros(3)])
        assert outer.used == 12
    collate([torch.zeros(3)])
    assert outer.used == 12


# Types that users registered.


class Molecule:
    def __init__(self, atoms: Any) -> None:
        self.atoms = atoms


@pytest.fixture(name="registry")
def _registry() -> Iterator[dict[Any, Any]]:
    before = dict(default_collate_fn_map)
    yield default_collate_fn_map
    default_collate_fn_map.clear()
    default_collate_fn_map.update(before)


def _molecules(batch: Any, *, collate_fn_map: Any = None) -> Any:
    from torch.utils.data._utils.collate import collate as by_type

    return ["molecules", by_type([one.atoms for one in batch], collate_fn_map=collate_fn_map)]


@pytest.mark.parametrize("room", ROOM)
def test_registered_types(registry: dict[Any, Any], room: int | None) -> None:
    assert is_default()
    registry[Molecule] = _molecules
    assert not is_default()
    samples = [(Molecule(np.full(3, i)), {"m": Molecule(torch.full((2,), i))}, i) for i in range(3)]
    assert_as_torch(samples, room)
    assert_as_torch([Molecule(1), Molecule(2)], room)


@pytest.mark.parametrize("key", [torch.Tensor, np.ndarray, float, int, str, (np.bool_, np.number, np.object_), object])
@pytest.mark.parametrize("room", ROOM)
def test_registered_for_a_type_of_torchs(registry: dict[Any, Any], key: Any, room: int | None) -> None:
    registry[key] = lambda batch, *, collate_fn_map=None: ("registered", len(batch), type(batch[0]).__name__)
    for name in ("one", "deep", "tensors", "scalars", "no dimension", "ints", "floats", "text", "bools", "masked"):
        assert_as_torch(SAMPLES[name](), room)
    assert_as_torch([Molecule(1)], room)


@pytest.mark.parametrize("key", [torch.Tensor, np.ndarray, float, int, str])
def test_types_that_were_removed(registry: dict[Any, Any], key: Any) -> None:
    del registry[key]
    for name in ("one", "tensors", "scalars", "no dimension", "ints", "floats", "text", "bools"):
        assert_as_torch(SAMPLES[name](), None)
