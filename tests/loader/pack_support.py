"""Batches that travel as between processes, and what to compare them by."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from penstock.loader.collate import thread
from penstock.loader.executors.process.ring import SharedFile, Slot
from penstock.loader.executors.process.transport import pack, unpack

ROOM = {"slot": 1 << 30, "small slot": 1 << 14, "no slot": None}
"""Bytes that a slot can have."""

_numbers = itertools.cycle((1, 2))


class _Limited(SharedFile):
    """A file whose slots get only so much memory."""

    most = 0

    def reserve(self, begin: int, size: int) -> None:
        if (begin + size) % self.room > self.most:
            raise OSError("no more memory")
        super().reserve(begin, size)


@functools.cache
def _memory(room: int) -> SharedFile:
    file = _Limited()
    file.most = room
    return file


def slot_of(room: int | None = ROOM["slot"]) -> Slot:
    """An empty slot, until the next but one is asked for."""
    if room is None:
        return Slot(_memory(1), 0, 0)
    return Slot(_memory(room), next(_numbers), 0)


DTYPES = [
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.complex32),
]


def travel(batch: Any, room: int | None = ROOM["slot"], slot: Slot | None = None) -> tuple[Any, int]:
    """Pack, carry the bytes over, as the pipe and the ring do, and unpack. Return how many bytes travelled, too."""
    slot = slot or slot_of(room)
    data = pack(batch, slot)
    file, begin = slot._file, slot._begin
    memory = np.frombuffer(file.map[begin : begin + slot.used], np.uint8).copy() if slot.used else None
    return unpack(data, memory), len(data) + slot.used


def bits(tensor: torch.Tensor) -> bytes:
    """The elements as bytes, one after the other. Copies of floats would not do: some change the bits of NaN."""
    tensor, size = tensor.detach().resolve_conj().resolve_neg(), tensor.itemsize
    raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    steps = [step * size for step in tensor.stride()]
    return raw.as_strided((*tensor.shape, size), (*steps, 1), tensor.storage_offset() * size).numpy().tobytes()


def assert_same(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    if isinstance(theirs, torch.Tensor):
        assert (ours.dtype, ours.shape, ours.requires_grad) == (theirs.dtype, theirs.shape, theirs.requires_grad)
        assert bits(ours) == bits(theirs)
    elif isinstance(theirs, np.ndarray):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert ours.tobytes() == theirs.tobytes()
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        for key in theirs:
            assert_same(ours[key], theirs[key])
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert_same(one, other)
    else:
        assert ours == theirs or (ours != ours and theirs != theirs)


def content(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    count = int(np.prod(shape, dtype=int)) * dtype.itemsize
    values = torch.arange(count, dtype=torch.int64).remainder(2 if dtype is torch.bool else 251).to(torch.uint8)
    return values.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


@contextmanager
def collating_into(slot: Slot | None) -> Iterator[None]:
    """In this thread, batches are collated into a slot."""
    before, thread.arena = thread.arena, None if slot is None else slot.empty
    try:
        yield
    finally:
        thread.arena = before
