"""Odd batches: tensors, arrays and objects as programs make them, and what to compare them by.

`odd_batch` asks a function to choose, so that hypothesis can draw batches (`odd_batches`), and that `OddBatches`, a
data set, makes the same ones in every process.
"""

from __future__ import annotations

import dataclasses
import enum
import random
import warnings
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from pack_support import DTYPES, bits, content
from torch.utils.data import Dataset

Choose = Callable[[Sequence[Any]], Any]
"""Takes one of several."""

SHAPES = [(), (0,), (3, 0, 2), (1,), (1, 1), (7,), (1, 7), (7, 1), (2, 3, 4), (1, 3, 1, 5), (1500,), (40, 3, 20)]


def _one_element(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous, says torch, whatever its strides are."""
    return tensor.as_strided((1, 1), (3, 5)) if tensor.numel() else tensor


def _expanded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[..., :1].expand(*tensor.shape[:-1], 300) if tensor.dim() and tensor.numel() else tensor


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "itself": lambda t: t,
    "last column": lambda t: t[..., -1] if t.numel() and t.dim() else t,
    "column of one row": lambda t: t[:1, ..., -1] if t.numel() and t.dim() > 1 else t,
    "one element": _one_element,
    "transposed": lambda t: t.permute(tuple(reversed(range(t.dim())))),
    "channels_last": lambda t: t[None].movedim(1, -1) if t.dim() == 3 else t,
    "every other": lambda t: t[::2] if t.dim() else t,
    "offset": lambda t: t[1:] if t.dim() else t,
    "expanded": _expanded,
    "windows": lambda t: t.unfold(0, 3, 1) if t.dim() and len(t) > 2 else t,
    "conjugate": lambda t: t.conj(),
    "conjugate, transposed": lambda t: t.mH if t.dim() > 1 else t,
    "negative": lambda t: t.conj().imag if t.is_complex() else t,
    "real": lambda t: t.real,
    "as bytes": lambda t: t.view(torch.uint8) if t.dim() and not t.is_complex() else t,
}


class Labelled(torch.Tensor):
    """A subclass with an attribute."""


def _with_attribute(tensor: torch.Tensor) -> torch.Tensor:
    tensor.label = {"name": "cat", "box": torch.arange(4)}
    return tensor


def _wants_gradient(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.requires_grad_(tensor.is_floating_point() or tensor.is_complex())


DRESSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "plain": lambda t: t,
    "wants a gradient": _wants_gradient,
    "parameter": lambda t: torch.nn.Parameter(t, requires_grad=t.is_floating_point()),
    "subclass": lambda t: _with_attribute(t.as_subclass(Labelled)),
    "attribute": _with_attribute,
}


def odd_tensor(choose: Choose) -> torch.Tensor:
    """Of any type, shape and memory."""
    tensor = content(choose(SHAPES), choose(DTYPES))
    return DRESSES[choose(list(DRESSES))](VIEWS[choose(list(VIEWS))](tensor))


def _shared(choose: Choose) -> Any:
    """A tensor beside views of it."""
    base = content(choose([(8,), (4, 6), (1200,), (40, 3, 20)]), choose([torch.float32, torch.complex64, torch.int64]))
    views = [VIEWS[choose(list(VIEWS))](base) for _ in range(choose([1, 2, 3]))]
    return choose([[base, *views], {"views": views, "base": base}, [base, base, *views]])


def _neighbours(choose: Choose) -> Any:
    """Parts of a much larger tensor that overlap: inputs and targets, as of language models."""
    base, at = content((20_000,), choose([torch.uint8, torch.int32, torch.float64])), choose([0, 1, 777])
    size = choose([5, 600, 3000])
    return base[at : at + size], base[at + 1 : at + 1 + size]


_SPARSE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "coo": lambda t: t.to_sparse(),
    "not coalesced": lambda t: torch.sparse_coo_tensor([[0, 0, 1], [1, 1, 0]], [1.0, 2.0, 3.0], t.shape),
    "nothing": lambda t: torch.sparse_coo_tensor(size=(0, 3)),
    "hybrid": lambda t: t.to_sparse(1),
    "csr": lambda t: t.to_sparse_csr(),
    "csc": lambda t: t.to_sparse_csc(),
    "bsr": lambda t: t.to_sparse_bsr((2, 2)),
    "bsc": lambda t: t.to_sparse_bsc((2, 2)),
}


def _sparse(choose: Choose) -> torch.Tensor:
    """Without a gradient, which torch does not pickle."""
    return _SPARSE[choose(list(_SPARSE))](torch.eye(choose([4, 600])))


def _quantised(choose: Choose) -> torch.Tensor:
    values = torch.linspace(0, 1, choose([12, 6000])).view(3, -1)
    dtype = choose([torch.quint8, torch.qint8, torch.qint32])
    if choose([False, True]):
        return torch.quantize_per_tensor(values, 0.1, 3, dtype)
    return torch.quantize_per_channel(values, torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0, 1, 2]), 0, dtype)


def _nested(choose: Choose) -> torch.Tensor:
    pieces = [torch.arange(float(choose([3, 2000]))), torch.arange(5.0)]
    return torch.nested.nested_tensor(pieces, layout=choose([torch.strided, torch.jagged]))


ARRAY_DTYPES: list[Any] = [
    *("?", "u1", "<i4", ">i4", ">f8", "f2", "c16", "g", "S5", "U3", "V3", ">U2", "M8[D]", ">M8[us]", "m8[25s]", "O"),
    *([("a", "u1"), ("b", ">f8", (2,))], np.dtype([("a", "u1"), ("b", "f8")], align=True)),
    *([("a", "u1"), ("o", "O")], np.dtype({"names": ["x", "y"], "formats": ["u4", "u1"], "offsets": [0, 1]})),
    *(np.dtype("f4", metadata={"unit": "m"}), np.dtype([("inner", [("c", "i2"), ("d", "S3")])])),
]


def _fill(shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    array = np.zeros(shape, dtype)
    if array.dtype.hasobject:
        array[...] = (1, {"a": [1]}) if array.dtype.names else {"a": [1, "b"]}
    elif array.size and array.dtype.itemsize:
        size = array.dtype.itemsize * array.size
        one = b"a\0\0\0" if array.dtype.kind == "U" else b"\x01\x02\x03\x05\x07\x0b\x0d"
        one = one[::-1] if array.dtype.str.startswith(">U") else one
        one = b"\x01\0" if array.dtype.kind in "?b" else b"\x01" + b"\0" * 15 if array.dtype.kind == "g" else one
        array = np.frombuffer(bytearray((one * (size // len(one) + 1))[:size]), array.dtype).reshape(shape)
    return array


LAYOUTS: dict[str, Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]] = {
    "C": lambda a: a,
    "Fortran": lambda a: np.asfortranarray(a) if a.ndim else a,
    "transposed": lambda a: a.T,
    "reversed": lambda a: a[::-1] if a.ndim else a,
    "last column": lambda a: a[..., -1] if a.size and a.ndim else a,
    "every other": lambda a: a[..., ::2] if a.ndim else a,
    "spread": lambda a: np.broadcast_to(a, (2, *a.shape)),
}


def odd_array(choose: Choose) -> Any:
    """Of any type, shape and memory, writable or not."""
    array = LAYOUTS[choose(list(LAYOUTS))](_fill(choose(SHAPES), choose(ARRAY_DTYPES)))
    if isinstance(array, np.ndarray) and choose([False, True]):
        array.flags.writeable = False
    return array


def _masked(choose: Choose) -> Any:
    array = _fill(choose([(0,), (4,), (3, 500)]), choose(["i4", "f8", "M8[D]", [("a", "u1"), ("b", "f8")]]))
    mask = choose([np.ma.nomask, np.arange(array.size).reshape(array.shape) % 3 == 0])
    masked = np.ma.masked_array(array, mask)
    if array.dtype.kind in "if":
        masked.fill_value = choose([7, 99])
    return masked


class Readings(np.ndarray):  # type: ignore[type-arg]
    """A subclass of arrays."""


ARRAY_KINDS: dict[str, Callable[[], Any]] = {
    "matrix": lambda: np.matrix([[1, 2], [3, 4]]),
    "matrix, transposed": lambda: np.matrix(np.arange(1200.0).reshape(30, 40)).T,
    "records": lambda: np.rec.array([(1, 2.0), (3, 4.0)], dtype=[("a", "u1"), ("b", "f8")]),
    "record": lambda: np.rec.array([(1, 2.0)], dtype=[("a", "u1"), ("b", "f8")])[0],
    "subclass": lambda: np.arange(2000).view(Readings),
    "masked": lambda: np.ma.masked,
    "scalar": lambda: np.float32(1.5),
    "moment": lambda: np.datetime64("2026-01-01T00:00:01"),
    "no time": lambda: np.timedelta64("NaT"),
    "void": lambda: np.zeros((), [("a", "u1"), ("b", ">f8")])[()],
    "text": lambda: np.str_("é"),
    "no bytes": lambda: np.zeros(3, "S0"),
    "no fields": lambda: np.zeros(3, np.dtype([])),
}
if hasattr(np.dtypes, "StringDType"):
    ARRAY_KINDS["strings"] = lambda: np.array(["a" * 100, "é", ""], dtype=np.dtypes.StringDType())


@dataclasses.dataclass
class Box:
    """A data class."""

    size: Any
    name: str = "box"


@dataclasses.dataclass(frozen=True)
class Frozen:
    """One that does not change."""

    size: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Slots:
    """One without a dict."""

    size: Any
    name: str = "slots"


Point = namedtuple("Point", ["x", "y"])


class Typed(NamedTuple):
    """A named tuple with types."""

    x: Any
    y: int = 3


class Colour(enum.Enum):
    """Its members are the same objects everywhere."""

    RED = 1
    BLUE = "blue"


class Level(enum.IntFlag):
    """Flags that are numbers."""

    LOW = 1
    HIGH = 2


PLAIN: list[Any] = [
    *(None, True, 0, -(2**80), 1.5, float("nan"), float("-inf"), 1 + 2j, "", "é\0\U0001f600", "\udcff", b"", b"\0\xff"),
    *(bytearray(b"ab"), bytearray(5000), range(3, 9, 2), {1, 2}, frozenset("ab"), Colour.RED, Level.LOW | Level.HIGH),
    *(torch.Size((1, 2)), torch.float32, torch.device("cpu"), torch.channels_last, Counter("aab"), slice(1, None), ...),
    *(np.dtype(">f4"), b"x" * 10_000, OrderedDict(), defaultdict(list, a=[1]), int, (), [], {}),
]

AROUND: list[Callable[[Any, Any], Any]] = [
    *(lambda a, b: [a, b], lambda a, b: (a, b), lambda a, b: {"a": a, 2: b}, lambda a, b: OrderedDict(b=b, a=a)),
    *(Point, lambda a, b: Typed(a), lambda a, b: [Box(a), b], lambda a, b: Frozen([a, b]), lambda a, b: Slots((a, b))),
    *(lambda a, b: defaultdict(list, a=[a], b=[b]), lambda a, b: [a, {"again": a}, b], lambda a, b: [b, [[], (b, a)]]),
]

LEAVES: list[Callable[[Choose], Any]] = [
    *(odd_tensor, odd_tensor, odd_tensor, _shared, _neighbours, _sparse, _quantised, _nested),
    *(odd_array, odd_array, _masked),
    *(lambda choose: ARRAY_KINDS[choose(list(ARRAY_KINDS))](), lambda choose: choose(PLAIN)),
]


def odd_batch(choose: Choose) -> Any:
    """A batch of whatever is chosen."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # prototypes, and what will be removed
        return _batch(choose, choose([0, 1, 1, 2]))


def _batch(choose: Choose, depth: int) -> Any:
    if not depth:
        return choose(LEAVES)(choose)
    return choose(AROUND)(_batch(choose, depth - 1), _batch(choose, 0))


@st.composite
def odd_batches(draw: Any) -> Callable[[], Any]:
    """Functions that make an odd batch, the same one each time."""
    chosen: list[Any] = []

    def choose(options: Sequence[Any]) -> Any:
        chosen.append(options[draw(st.integers(0, len(options) - 1))])
        return chosen[-1]

    odd_batch(choose)
    return lambda: odd_batch(partial(_next_of, iter(list(chosen))))


def _next_of(chosen: Iterator[Any], options: Sequence[Any]) -> Any:
    return next(chosen)


class OddBatches(Dataset[Any]):
    """Batch i is a function of i."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return odd_batch(random.Random(index).choice)


def identity(batch: Any) -> Any:
    """A ``collate_fn`` that changes nothing."""
    return batch


def last_column(rows: list[torch.Tensor]) -> torch.Tensor:
    """A ``collate_fn``. Of a batch of one row it is one element, as far from the next as a row is long."""
    return torch.stack(rows)[:, -1]


def assert_alike(ours: Any, theirs: Any) -> None:
    """Whether a batch is what another one is, with the same objects in the same places."""
    _assert_equal(ours, theirs)
    tensors = list(zip(_tensors(ours), _tensors(theirs), strict=True))
    for number, (one, other) in enumerate(tensors):
        assert [one is t for t, _ in tensors[:number]] == [other is t for _, t in tensors[:number]]


def _tensors(batch: Any) -> Iterator[torch.Tensor]:
    """All strided tensors of a batch, with those that are their attributes."""
    if isinstance(batch, torch.Tensor):
        if batch.layout is torch.strided and not batch.is_nested and not batch.is_quantized:
            yield batch
        for part in vars(batch).values():
            yield from _tensors(part)
    else:
        for part in _parts(batch) or ():
            yield from _tensors(part)


def _parts(value: Any) -> list[Any] | None:
    """What a container holds; None for other values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, dict):
        return [part for pair in value.items() for part in pair]
    return list(value) if isinstance(value, list | tuple) else None


def _assert_equal(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    if isinstance(theirs, torch.Tensor):
        _assert_equal_tensors(ours, theirs)
    elif isinstance(theirs, np.ndarray | np.generic):
        _assert_equal_arrays(ours, theirs)
    elif (parts := _parts(theirs)) is not None:
        if isinstance(theirs, defaultdict):
            assert ours.default_factory is theirs.default_factory
        for one, other in zip(_parts(ours) or (), parts, strict=True):
            _assert_equal(one, other)
    else:
        assert ours is theirs or ours == theirs or (ours != ours and theirs != theirs)


def _assert_equal_tensors(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    for name in ("dtype", "layout", "device", "requires_grad", "is_nested", "is_quantized", "is_leaf"):
        assert getattr(ours, name) == getattr(theirs, name), name
    if theirs.is_nested:
        pairs = zip(ours.unbind(), theirs.unbind(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
        return
    _assert_equal(vars(ours), vars(theirs))
    assert ours.shape == theirs.shape
    if theirs.layout is torch.sparse_coo:
        assert ours.is_coalesced() == theirs.is_coalesced()
        ours, theirs = ours.detach(), theirs.detach()
        _assert_equal([ours._indices(), ours._values()], [theirs._indices(), theirs._values()])
    elif theirs.layout is not torch.strided:
        rows = "crow_indices" if theirs.layout in (torch.sparse_csr, torch.sparse_bsr) else "ccol_indices"
        columns = "col_indices" if rows == "crow_indices" else "row_indices"
        for name in (rows, columns, "values"):
            _assert_equal(getattr(ours.detach(), name)(), getattr(theirs.detach(), name)())
    elif theirs.is_quantized:
        assert ours.qscheme() == theirs.qscheme()
        assert torch.equal(ours.int_repr(), theirs.int_repr())
        assert torch.equal(ours.dequantize(), theirs.dequantize())
    else:
        assert (ours.is_conj(), ours.is_neg()) == (theirs.is_conj(), theirs.is_neg())
        assert bits(_as_stored(ours)) == bits(_as_stored(theirs))
        if _is_dense(theirs):
            assert _steps(ours) == _steps(theirs)


def _as_stored(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, neither conjugated nor negated."""
    with torch._C.DisableTorchFunctionSubclass():
        tensor = tensor.detach().as_subclass(torch.Tensor)
        tensor = tensor.conj() if tensor.is_conj() else tensor
        return torch._neg_view(tensor) if tensor.is_neg() else tensor


def _steps(tensor: torch.Tensor) -> list[int]:
    """Strides of the dimensions that have more than one element."""
    return [step for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether there are no gaps between the elements, nor several in one place."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.numel() == last + 1 and 0 not in _steps(tensor)


def _assert_equal_arrays(ours: Any, theirs: Any) -> None:
    if theirs.dtype.kind in "mM" and not theirs.size and theirs.dtype.byteorder == ">":
        # NumPy's pickle loses the byte order.
        theirs = theirs.astype(theirs.dtype.newbyteorder("="))
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
    assert ours.dtype.descr == theirs.dtype.descr if theirs.dtype.names is None else True
    assert ours.dtype.isalignedstruct == theirs.dtype.isalignedstruct
    assert (ours.dtype.str, ours.dtype.fields) == (theirs.dtype.str, theirs.dtype.fields)
    assert (ours.dtype.metadata or {}) == (theirs.dtype.metadata or {})
    if isinstance(theirs, np.ma.MaskedArray):
        if theirs is np.ma.masked:
            assert ours is theirs
            return
        assert np.array_equal(np.ma.getmaskarray(ours), np.ma.getmaskarray(theirs))
        assert ours.fill_value.tobytes() == theirs.fill_value.tobytes()
        ours, theirs = ours.data, theirs.data
    if theirs.dtype.names:  # between fields there may be anything
        assert all(np.array_equal(ours[name], theirs[name]) for name in theirs.dtype.names)
    elif theirs.dtype.hasobject:
        assert ours.tolist() == theirs.tolist()
    else:
        assert ours.tobytes() == theirs.tobytes()
    if isinstance(theirs, np.ndarray):
        assert not theirs.flags.f_contiguous or ours.flags.f_contiguous
        assert ours.flags.writeable or not theirs.flags.writeable
