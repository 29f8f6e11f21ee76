"""How much memory the ring has: by what batches usually are, and more only for those that need it."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Callable
from typing import Any

import pytest
import torch
from full_run import full_only
from process_support import allocated, looks_like, worker_slot

from penstock.errors import RingError
from penstock.loader.executors.process.pack import pack, unpack
from penstock.loader.executors.process.ring import SPARE, Ring

MIB = 1 << 20
HEAD = 4096


def ring_of(depth: int = 4, nbytes: int = MIB, **options: Any) -> Ring:
    ring = Ring(depth, depth, head=HEAD, **options)
    ring.learn(nbytes)
    return ring


def bring(ring: Ring, nbytes: int, value: int, tensors: int = 1) -> Any:
    """A batch of so many bytes, made by a worker and delivered."""
    slot = ring.lend()
    assert slot is not None
    mine = worker_slot(ring, slot)
    packed = pack([torch.full((nbytes // tensors,), value, dtype=torch.uint8) for _ in range(tensors)], mine)
    assert not packed.beside
    slot.size = max(slot.size, mine.capacity)
    batch = unpack(packed.data, ring.lease(slot, packed.table))
    ring.learn(nbytes)
    return batch


def test_slots_that_nobody_needs_have_no_memory() -> None:
    ring = ring_of()
    for value in range(20):
        assert looks_like(bring(ring, MIB, value), value)
    assert allocated(ring) == MIB


@full_only("large batches for each", but=["7"])
@pytest.mark.parametrize("tensors", [1, 7])
def test_a_batch_unlike_the_others_has_more_memory_as_long_as_it_lives(tensors: int) -> None:
    ring = ring_of()
    held = None
    for value in range(40):
        nbytes = (60 if value == 20 else 1) * MIB
        batch = bring(ring, nbytes, value, tensors)
        assert looks_like(batch, value)
        if value == 20:
            held = batch
            assert 60 * MIB <= allocated(ring) <= 70 * MIB
        if held is not None and value == 25:
            assert looks_like(held, 20)
            assert allocated(ring) >= 61 * MIB
            held = None
        if value > 26:
            assert allocated(ring) <= 3.1 * MIB
        del batch


@pytest.mark.parametrize("first", [60, 1])
def test_a_first_batch_unlike_the_others_does_not_tell_their_size(first: int) -> None:
    ring = ring_of(4, first * MIB)
    for value in range(10):
        bring(ring, MIB, value)
    assert ring.slot_bytes == MIB
    assert allocated(ring) <= 2 * MIB


@full_only("hundreds of large batches")
def test_batches_that_grow_slowly_have_slots_of_their_size() -> None:
    ring = ring_of()
    nbytes = MIB
    for value in range(80):
        nbytes = nbytes * 104 // 100
        lent = [ring.lend() for _ in range(4)]
        batch = bring(ring, nbytes, value)
        assert looks_like(batch, value)
        del batch
        for slot in lent:
            assert slot is not None
            ring.give_back(slot)
    assert allocated(ring) <= 6 * nbytes


def test_batches_that_become_smaller_leave_smaller_slots() -> None:
    ring = ring_of(4, 8 * MIB)
    held = [bring(ring, 8 * MIB, value) for value in range(SPARE)]
    assert allocated(ring) == SPARE * 8 * MIB
    held.clear()
    for value in range(24):
        bring(ring, MIB, value)
    assert allocated(ring) == SPARE * MIB


def test_what_was_used_once_is_given_back_after_a_while() -> None:
    ring = ring_of()
    held = [bring(ring, MIB, value) for value in range(SPARE)]
    assert allocated(ring) == SPARE * MIB
    held.clear()
    for value in range(150):
        bring(ring, MIB, value % 250)
    assert allocated(ring) == MIB


def test_batches_that_are_large_often_keep_their_memory() -> None:
    ring = ring_of(1)
    sizes = set()
    for value in range(64):
        bring(ring, (4 if value % 2 else 1) * MIB, value)
        if value > 16:
            sizes.add(allocated(ring))
    assert sizes == {4 * MIB}


def test_what_a_batch_held_before_it_grew_stays() -> None:
    """The memory of the first tensors is mapped twice by then."""
    ring = ring_of(1)
    batch = None
    for value in range(5):
        slot = ring.lend()
        assert slot is not None
        mine = worker_slot(ring, slot)
        tensors = []
        for part in range(6):
            tensor = mine.empty((MIB // 2,), torch.uint8)
            assert tensor is not None
            tensors.append(tensor.fill_(value * 6 + part))
        packed = pack(tensors, mine)
        assert [offset for offset, _ in packed.table] == [part * MIB // 2 for part in range(6)], "copied"
        slot.size = mine.capacity
        batch = unpack(packed.data, ring.lease(slot, packed.table))
        assert [int(tensor[5]) for tensor in batch] == [value * 6 + part for part in range(6)]
    del batch


@pytest.fixture(name="limited")
def _limited() -> Any:
    """Have files end at some place: the slots of a ring that is there already have to lie before it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(nbytes: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("most", [1, 2, 3, 5])
def test_fewer_slots_where_there_is_no_memory_for_all(limited: Callable[[int], None], most: int) -> None:
    ring = Ring(4, 4, head=HEAD)
    limited(HEAD + (most - 1) * (1 << 40) + MIB)
    ring.learn(MIB)
    lent = []
    while (slot := ring.lend()) is not None:
        lent.append(slot)
    assert len(lent) == most
    assert ring.in_flight == max(1, most - SPARE)
    for slot in lent:
        ring.give_back(slot)
    held = []
    while not ring.short:
        held.append(bring(ring, MIB, len(held)))
    assert len(held) == min(SPARE, most - 1)
    assert ring.lend() is not None, "one is left for what comes"
    assert all(looks_like(batch, value) for value, batch in enumerate(held))


def test_no_slot_at_all_is_an_error(limited: Callable[[int], None]) -> None:
    ring = Ring(4, 4, head=HEAD)
    limited(MIB)
    with pytest.raises(RingError, match=r"a batch needs 1\.0 MiB.*the system refuses.*lower batch_size"):
        ring.learn(MIB)
    ring.learn(MIB // 2)
    assert ring.lend() is not None


def test_more_slots_once_there_is_memory_again(limited: Callable[[int], None]) -> None:
    ring = Ring(4, 4, head=HEAD)
    limited(HEAD + MIB)
    ring.learn(MIB)
    slot = ring.lend()
    assert slot is not None
    assert ring.lend() is None
    limited(resource.RLIM_INFINITY)
    for _ in range(64):
        ring.learn(MIB)
    assert ring.lend() is not None
    assert ring.in_flight == 4


def test_ranks_of_a_machine_share_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.loader.memory import available_memory

    left = available_memory()
    if left is None:
        pytest.skip("nobody knows how much there is")
    for name, value in {"RANK": "0", "WORLD_SIZE": "4096", "LOCAL_WORLD_SIZE": "1024"}.items():
        monkeypatch.setenv(name, value)
    ring = Ring(1, 1, head=HEAD)
    with pytest.raises(RingError, match="MiB are left on this machine or in this container, for 1024 ranks"):
        ring.learn(left // 512)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    gc.collect()
    Ring(1, 1, head=HEAD).learn(left // 512)


def test_a_batch_that_is_not_wanted_leaves_no_memory_either() -> None:
    ring = ring_of()
    slot = ring.lend()
    assert slot is not None
    mine = worker_slot(ring, slot)
    assert mine.empty((20 * MIB,), torch.uint8) is not None
    slot.size = mine.capacity
    assert os.fstat(ring.file.fd).st_blocks * 512 >= 20 * MIB
    ring.give_back(slot)
    assert allocated(ring) == MIB


def test_slots_take_no_descriptors() -> None:
    before = len(os.listdir("/proc/self/fd"))
    ring = ring_of(30)
    held = [bring(ring, MIB // 256, value) for value in range(SPARE)]
    lent = [ring.lend() for _ in range(30)]
    for slot in lent:
        assert slot is not None
        assert ring.memory(slot).size == slot.size
    assert len(os.listdir("/proc/self/fd")) == before + 1
    assert all(looks_like(batch, value) for value, batch in enumerate(held))


def test_small_batches_that_become_large_leave_no_slots_too_many() -> None:
    ring = Ring(2, 7, head=HEAD)
    ring.learn(MIB // 8)
    lent = [ring.lend() for _ in range(7 + SPARE)]
    for slot in lent:
        assert slot is not None
        ring.give_back(slot)
    assert allocated(ring) == (7 + SPARE) * MIB // 8
    for _ in range(16):
        ring.learn(16 * MIB)
    assert ring.count == 2 + SPARE
    assert allocated(ring) == (2 + SPARE) * MIB // 8


def test_what_a_worker_took_that_cannot_tell_is_given_back() -> None:
    ring = ring_of()
    lent = [ring.lend() for _ in range(2)]
    for slot in lent:
        assert slot is not None
        assert worker_slot(ring, slot).empty((20 * MIB,), torch.uint8) is not None
    assert allocated(ring) == 40 * MIB
    for slot in lent:
        assert slot is not None
        ring.take_back(slot)
    assert allocated(ring) == 2 * MIB
    assert ring.lend() in lent
