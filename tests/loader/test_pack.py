"""Batches between processes: what `pack` writes, `unpack` gives back, whatever it is, and wherever it travelled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from full_run import full_only
from hypothesis import given
from hypothesis import strategies as st
from pack_support import DTYPES, ROOM, assert_same, bits, collating_into, content, slot_of, travel

from penstock.loader.collate import collate
from penstock.loader.executors.process.ring import Slot
from penstock.loader.executors.process.transport import SMALL, pack


@pytest.fixture(params=ROOM, name="room")
def _room(request: pytest.FixtureRequest) -> int | None:
    return ROOM[request.param]


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (7,), (3, 5), (2000,), (40, 3, 50), (1, 1, 1, 5000)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_types_and_shapes(dtype: torch.dtype, shape: tuple[int, ...], room: int | None) -> None:
    tensor = content(shape, dtype)
    ours, cost = travel(tensor, room)
    assert_same(ours, tensor)
    assert ours.is_contiguous()
    assert cost < tensor.nbytes + 400


def strange() -> dict[str, torch.Tensor]:
    base = content((24, 10, 12), torch.float32)
    image = content((4, 31, 33, 3), torch.uint8)
    return {
        "transposed": base.mT,
        "permuted": base.permute(2, 0, 1),
        "every other": base[::2, :, ::3],
        "a column": base[:, 1, 1],
        "channels_last": image.permute(0, 3, 1, 2),
        "channels_last_3d": content((2, 3, 4, 5, 6), torch.float64).to(memory_format=torch.channels_last_3d),
        "expanded": content((1, 7), torch.int64).expand(500, 7),
        "expanded and cut": content((3000, 1), torch.int64)[5:].expand(2995, 3),
        "windows": content((3000,), torch.float32).unfold(0, 10, 1),
        "single": content((1, 1, 3), torch.uint8).permute(2, 0, 1),
        "flipped": torch.from_numpy(np.arange(2000.0)[::-1].copy()),
        "bytes of floats": base.view(torch.uint8),
        "odd offset": content((9001,), torch.uint8)[1:],
        "conjugate": content((900,), torch.complex64).conj(),
        "conjugate, transposed": content((30, 40), torch.complex64).mH,
        "negative": content((900,), torch.complex64).conj().imag,
        "real": content((900,), torch.complex64).real,
        "grows": content((700,), torch.float32).requires_grad_(),
        "of inference": torch.inference_mode()(lambda: torch.ones(5000))(),
    }


@pytest.mark.parametrize("name", strange())
def test_memory_of_every_kind(name: str, room: int | None) -> None:
    tensor = strange()[name]
    ours, _ = travel(tensor, room)
    assert_same(ours, tensor)
    twice, _ = travel([tensor, {"again": tensor}], room)
    assert twice[0] is twice[1]["again"]
    assert_same(twice[0], tensor)


def test_strides_stay_where_the_memory_is_dense(room: int | None) -> None:
    for name in ("transposed", "permuted", "channels_last", "channels_last_3d"):
        tensor = strange()[name]
        assert travel(tensor, room)[0].stride() == tensor.stride()
    assert travel(strange()["channels_last"], room)[0].is_contiguous(memory_format=torch.channels_last)


@given(
    shape=st.lists(st.integers(0, 6), max_size=4),
    order=st.randoms(use_true_random=False),
    steps=st.lists(st.integers(1, 3), min_size=4, max_size=4),
    dtype=st.sampled_from([torch.uint8, torch.float64, torch.complex128]),
    room=st.sampled_from(list(ROOM.values())),
)
def test_any_view(shape: list[int], order: Any, steps: list[int], dtype: torch.dtype, room: int | None) -> None:
    dims = list(range(len(shape)))
    order.shuffle(dims)
    tensor = content((*shape, 32), dtype).permute(*dims, len(dims))
    tensor = tensor[tuple(slice(None, None, step) for step in steps[: tensor.dim()])]
    assert_same(travel([tensor, tensor[..., :3]], room)[0], [tensor, tensor[..., :3]])


def test_a_small_view_does_not_ship_its_storage(room: int | None) -> None:
    big = torch.zeros(1 << 20)
    for tensor in (big[5:10], big[::1000], big[:2000], torch.nn.Parameter(big[3:6]), big[:5] + 0):
        ours, cost = travel([tensor], room)
        assert_same(ours, [tensor])
        assert cost < 10_000
    ours, cost = travel([big[:5], big[-5:]], room)
    assert cost < 1000


def test_an_expanded_tensor_ships_what_it_is_made_of(room: int | None) -> None:
    tensor = torch.arange(3.0).expand(1 << 20, 3)
    ours, cost = travel(tensor, room)
    assert cost < 1000
    assert ours.stride() == (0, 1)
    assert torch.equal(ours, tensor)


def test_views_of_one_memory_arrive_with_memory_of_their_own(room: int | None) -> None:
    base = torch.arange(5000.0)
    ours, _ = travel([base, base[1:], base], room)
    assert_same(ours, [base, base[1:], base])
    assert ours[2] is ours[0]
    ours[0][1] = -1.0
    assert ours[1][0] == 1.0


def test_storages_of_different_sizes_over_one_address(room: int | None) -> None:
    array = np.arange(4000.0)
    tensors = [torch.from_numpy(array[:1000]), torch.from_numpy(array), torch.from_numpy(array[:2000])]
    assert_same(travel(tensors, room)[0], tensors)
    assert_same(travel([*tensors, *(tensor[:-1] for tensor in tensors)], room)[0][:3], tensors)


def test_leaves_and_others_want_gradients(room: int | None) -> None:
    leaf = torch.ones(3000, requires_grad=True)
    ours, _ = travel([leaf, leaf.detach(), leaf * 2], room)
    assert [tensor.requires_grad for tensor in ours] == [True, False, True]
    assert all(tensor.is_leaf for tensor in ours)
    ours[0].sum().backward()
    assert ours[0].grad.sum() == 3000


class Labelled(torch.Tensor):
    """A subclass with an attribute, as in torchvision's ``tv_tensors``."""

    label: str


class Slotted(torch.Tensor):
    __slots__ = ("extra",)


class OwnWay(torch.Tensor):
    def __reduce_ex__(self, protocol: Any) -> Any:
        return _own_way, (self.as_subclass(torch.Tensor),)


def _own_way(plain: torch.Tensor) -> torch.Tensor:
    return (plain + 1).as_subclass(OwnWay)


class Suspicious(torch.Tensor):
    """Cannot be computed with."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") in ("detach", "clone", "as_subclass", "resolve_conj", "resolve_neg"):
            raise AssertionError(f"{function} was called")
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.parametrize("size", [3, 3000])
def test_subclasses_and_attributes(size: int, room: int | None) -> None:
    labelled = torch.arange(float(size)).as_subclass(Labelled)
    labelled.label = "cat"
    ours, _ = travel([labelled, labelled], room)
    assert type(ours[0]) is Labelled
    assert ours[0].label == "cat"
    assert ours[0] is ours[1]
    assert bits(ours[0]) == bits(labelled)

    plain = torch.arange(size)
    plain.label = labelled
    (arrived,), _ = travel([plain], room)
    assert arrived.label.label == "cat"
    assert type(arrived) is torch.Tensor

    parameter = torch.nn.Parameter(torch.arange(float(size)))
    frozen = torch.nn.Parameter(torch.arange(size), requires_grad=False)
    ours, _ = travel([parameter, frozen], room)
    assert_same(ours, [parameter, frozen])

    slotted = torch.arange(size).as_subclass(Slotted)
    slotted.extra = 7
    assert travel(slotted, room)[0].extra == 7
    assert travel(torch.arange(size).as_subclass(OwnWay), room)[0][0] == 1
    suspicious = torch.arange(size).as_subclass(Suspicious)
    assert type(travel(suspicious, room)[0]) is Suspicious


@full_only("imports SymPy; test_odd_batches.py sends them, too")
def test_sparse_nested_quantised(room: int | None) -> None:
    dense = torch.eye(80) * torch.arange(80)
    for sparse in (dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_csc(), dense.to_sparse_bsr((2, 2))):
        ours, _ = travel([sparse, sparse], room)
        assert ours[0] is ours[1]
        assert ours[0].layout is sparse.layout
        assert torch.equal(ours[0].to_dense(), dense)
    pieces = [torch.arange(3000.0), torch.arange(5.0)]
    for layout in (torch.strided, torch.jagged):
        nested = travel(torch.nested.nested_tensor(pieces, layout=layout), room)[0]
        assert nested.is_nested
        assert all(torch.equal(a, b) for a, b in zip(nested.unbind(), pieces, strict=True))
    quantised = torch.quantize_per_tensor(torch.rand(3000), 0.1, 3, torch.quint8)
    ours = travel(quantised, room)[0]
    assert ours.is_quantized
    assert torch.equal(ours.int_repr(), quantised.int_repr())
    assert travel(torch.empty(3, device="meta"), room)[0].device.type == "meta"


def test_what_collate_has_put_into_the_slot_is_not_copied() -> None:
    slot = slot_of()
    with collating_into(slot):
        batch = collate([{"x": torch.full((1000,), i), "y": np.full(1000, i), "z": i} for i in range(4)])
    used = slot.used
    for part in (batch, batch["x"][1:], batch["x"].t(), batch["y"].numpy()):
        ours, cost = travel(part, slot=slot)
        assert_same(ours, part)
        assert slot.used == used
        assert cost < used + 1000


def test_small_tensors_do_not_hold_the_slot() -> None:
    slot = slot_of()
    pack([torch.zeros(SMALL, dtype=torch.uint8), np.zeros(SMALL, np.uint8)], slot)
    assert not slot.used
    pack(torch.zeros(SMALL + 1, dtype=torch.uint8), slot)
    assert slot.used == SMALL + 1


def test_what_does_not_fit_travels_in_the_message() -> None:
    slot = slot_of(1 << 14)
    batch = [content((SMALL + n,), torch.uint8) for n in range(1, 30)]
    ours, cost = travel(batch, slot=slot)
    assert_same(ours, batch)
    assert slot.refused
    assert 0 < slot.used <= slot.extent <= 1 << 14
    assert cost > 29 * SMALL


def test_a_slot_that_the_consumer_has_cut_is_extended_again() -> None:
    memory, number = slot_of()._file, 3
    Slot(memory, number, 0).empty((100_000,), torch.uint8)
    memory.discard(number * memory.room, 100_000)
    batch = content((100_000,), torch.uint8)
    assert_same(travel(batch, slot=Slot(memory, number, 0))[0], batch)
