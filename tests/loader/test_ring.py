"""The ring: a slot is never written to while anything looks at it, and comes back when nothing does."""

from __future__ import annotations

import gc
import os
import queue
import threading
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from process_support import worker_slot

from penstock.loader.executors.process.pack import pack, unpack
from penstock.loader.executors.process.region import Region
from penstock.loader.executors.process.ring import AHEAD, LIGHT, SPARE, Ring, Slot

HEAD = 4096
SIZE = 20_000


def ring_of(depth: int = 2, nbytes: int = SIZE, **options: Any) -> Ring:
    ring = Ring(depth, depth, head=HEAD, **options)
    ring.learn(nbytes)
    return ring


def worker_side(ring: Ring, slot: Slot) -> np.ndarray[Any, Any]:
    """The same memory as a worker maps it."""
    begin, size, _ = slot.address
    return Region(ring.file.fd, begin, size).memory


def deliver(ring: Ring, slot: Slot, batch: Any, copy: bool = False) -> Any:
    """A batch from a worker through the slot to the consumer."""
    mine = worker_slot(ring, slot)
    packed = pack(batch, mine)
    assert not packed.beside
    slot.size = mine.capacity
    return unpack(packed.data, (ring.copy if copy else ring.lease)(slot, packed.table))


def lend(ring: Ring) -> Slot:
    slot = ring.lend()
    assert slot is not None
    return slot


def free(ring: Ring) -> int:
    """How many slots can be lent."""
    slots = []
    while (slot := ring.lend()) is not None:
        slots.append(slot)
    for slot in slots:
        ring.give_back(slot)
    return len(slots)


def batch_of(value: int, size: int = 5000) -> dict[str, Any]:
    return {"x": torch.full((size,), value, dtype=torch.uint8), "y": np.full(size, value, np.uint8)}


def test_slots_are_made_once_their_size_is_known() -> None:
    ring = Ring(2, 2, head=HEAD)
    assert ring.lend() is None
    assert ring.in_flight == 2
    assert ring.slot_bytes == 0
    ring.learn(SIZE)
    assert ring.slot_bytes >= SIZE
    assert ring.slot_bytes % 4096 == 0
    slots = [lend(ring) for _ in range(2 + SPARE)]
    assert ring.lend() is None
    pieces = sorted((slot.begin, slot.size) for slot in slots)
    assert pieces[0][0] >= HEAD
    assert all(begin + size <= after for (begin, size), (after, _) in pairwise(pieces))
    assert sum(pieces[-1]) <= os.fstat(ring.file.fd).st_size


def test_workers_see_the_same_memory() -> None:
    ring = ring_of()
    slots = [lend(ring) for _ in range(5)]
    for number, slot in enumerate(slots):
        worker_side(ring, slot)[:] = number + 1
    for number, slot in enumerate(slots):
        (array,) = ring.lease(slot, [(0, slot.size)])
        assert (array == number + 1).all()


KEEP: dict[str, Callable[[dict[str, Any]], Any]] = {
    "the batch": lambda batch: batch,
    "a tensor": lambda batch: batch["x"],
    "an array": lambda batch: batch["y"],
    "a view": lambda batch: batch["x"][7:9],
    "a view of a view": lambda batch: batch["x"].view(50, 100).t()[3:, 4:][::2],
    "a row": lambda batch: batch["x"].view(50, 100).unbind()[3],
    "other type": lambda batch: batch["x"].view(torch.int32)[5:],
    "detached": lambda batch: batch["x"].detach()[1:],
    "numpy": lambda batch: batch["x"].numpy(),
    "part of numpy": lambda batch: batch["x"].numpy()[3:][::2],
    "part of the array": lambda batch: batch["y"][3:][::2],
    "array in other form": lambda batch: batch["y"].reshape(50, 100).T.view(np.int8)[2:],
    "tensor of the array": lambda batch: torch.from_numpy(batch["y"])[5:],
    "tensor of the array of the tensor": lambda batch: torch.as_tensor(batch["x"].numpy()[2:])[2:],
    "storage": lambda batch: batch["x"].untyped_storage(),
    "tensor of the storage": lambda batch: torch.empty(0, dtype=torch.uint8).set_(batch["x"].untyped_storage()),
    "memoryview": lambda batch: memoryview(batch["y"])[3:],
    "memoryview of numpy": lambda batch: memoryview(batch["x"].numpy()),
    "dlpack": lambda batch: torch.from_dlpack(batch["x"]),
    "numpy's dlpack": lambda batch: np.from_dlpack(batch["x"]),
    "alias": lambda batch: torch.Tensor._make_subclass(torch.nn.Parameter, batch["x"], False),
    "expanded": lambda batch: batch["x"][:1].expand(100),
    "flat iterator": lambda batch: batch["y"].flat,
}


def looks(kept: Any, value: int) -> bool:
    if isinstance(kept, dict):
        return all(looks(part, value) for part in kept.values())
    if isinstance(kept, torch.UntypedStorage):
        return kept[100] == value
    if isinstance(kept, np.flatiter):
        return bool((kept.base == value).all())
    if isinstance(kept, torch.Tensor):
        kept = kept.contiguous().view(torch.uint8).numpy()
    return bool((np.asarray(kept) == value).all())


@pytest.mark.parametrize("name", KEEP)
def test_whatever_is_kept_keeps_its_slot(name: str) -> None:
    ring = ring_of(1)
    kept = KEEP[name](deliver(ring, lend(ring), batch_of(7)))
    gc.collect()
    assert free(ring) == SPARE
    for _ in range(6):  # all other slots are used
        deliver(ring, lend(ring), batch_of(9))
    assert looks(kept, 7)
    del kept
    gc.collect()
    assert free(ring) == 1 + SPARE


def test_shared_storages_and_empty_tensors() -> None:
    ring = ring_of(1)
    base = torch.arange(2000)
    kept = deliver(ring, lend(ring), [base, base[5:], torch.empty(0)])
    del kept[0]
    gc.collect()
    assert free(ring) == SPARE
    del kept[0]
    gc.collect()
    assert free(ring) == 1 + SPARE


@given(st.data())
@settings(max_examples=40)
def test_no_slot_is_two_things_at_a_time(data: st.DataObject) -> None:
    """Deliver, keep, drop, lend and give back, learn of other sizes, in any order."""
    depth = data.draw(st.integers(1, 3))
    size = 5000
    ring = ring_of(depth, 2 * size + 200)
    held: list[tuple[int, Any]] = []
    lent: list[Slot] = []
    value = 0
    for _ in range(data.draw(st.integers(1, 30))):
        what = data.draw(
            st.sampled_from(["deliver", "deliver", "drop", "lend", "give back", "larger", "smaller", "cycle", "copy"])
        )
        if what in ("deliver", "cycle", "copy"):
            slot = lent.pop() if lent else ring.lend()
            if slot is None:
                continue
            value = value % 250 + 1
            batch = deliver(ring, slot, batch_of(value, size), copy=what == "copy" or ring.short)
            kept = KEEP[data.draw(st.sampled_from([*KEEP]))](batch)
            if what == "cycle":
                circle = [kept]
                circle.append(circle)
                del circle
            else:
                held.append((value, kept))
            del kept, batch
        elif what == "drop" and held:
            del held[data.draw(st.integers(0, len(held) - 1))]
        elif what == "lend":
            slot = ring.lend()
            if slot is not None:
                assert all(slot is not other for other in lent)
                worker_side(ring, slot)[:] = 255
                lent.append(slot)
        elif what == "give back" and lent:
            ring.give_back(lent.pop(0))
        elif what in ("larger", "smaller") and ring.slot_bytes < 100_000:
            for _ in range(5):
                ring.learn(ring.slot_bytes * 3 // 2 if what == "larger" else size)
        assert all(looks(kept, number) for number, kept in held)
    held.clear()
    gc.collect()
    for slot in lent:
        ring.give_back(slot)
    assert free(ring) == depth + SPARE
    assert blocks(ring) <= HEAD + 1.25 * ring.slot_bytes * (depth + SPARE)


def test_dropped_by_other_threads() -> None:
    ring = ring_of(4)
    waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
    wrong: list[int] = []

    def drop() -> None:
        while item := waiting.get():
            value, batch = item
            if not looks(batch, value):
                wrong.append(value)
            del item, batch

    threads = [threading.Thread(target=drop) for _ in range(3)]
    for thread in threads:
        thread.start()
    ways = {True: 0, False: 0}
    for number in range(600):
        slot = ring.lend()
        if slot is None:
            continue
        short = ring.short
        ways[short] += 1
        value = number % 250 + 1
        waiting.put((value, deliver(ring, slot, batch_of(value), copy=short)))
    for _ in threads:
        waiting.put(None)
    for thread in threads:
        thread.join()
    assert not wrong
    assert ways[False] > 0
    gc.collect()
    assert free(ring) == 4 + SPARE


def test_tensors_outlive_the_ring() -> None:
    ring = ring_of()
    batch = deliver(ring, lend(ring), batch_of(3))
    ring.close()
    del ring
    gc.collect()
    assert looks(batch, 3)
    batch["x"].add_(1)
    assert looks(batch["x"], 4)


def test_copies_free_their_slot_at_once() -> None:
    ring = ring_of(1)
    slot = lend(ring)
    batch = deliver(ring, slot, batch_of(3), copy=True)
    assert free(ring) == 1 + SPARE
    worker_side(ring, slot)[:] = 0
    assert looks(batch, 3)


def test_short_once_the_consumer_holds_what_it_may() -> None:
    ring = ring_of(2)
    held = []
    for _ in range(SPARE):
        assert not ring.short
        held.append(deliver(ring, lend(ring), batch_of(1)))
    assert ring.short
    assert free(ring) == ring.in_flight == 2
    held.pop(1)
    assert not ring.short


@pytest.mark.parametrize("batches", [0, 1, 2, 3, 50])
def test_max_bytes(batches: int) -> None:
    ring = ring_of(2, max_bytes=batches * SIZE)
    assert ring.in_flight == max(1, min(batches, 2))
    assert free(ring) == ring.in_flight + SPARE
    held = []
    for number in range(10):  # goes on, whatever is held
        held.append((number, deliver(ring, lend(ring), batch_of(number), copy=ring.short)))
        assert free(ring) >= ring.in_flight
    assert all(looks(batch, number) for number, batch in held)


def test_more_small_slots() -> None:
    assert free_of(Ring(2, 7, head=HEAD), LIGHT // 2) == 7 + SPARE
    assert free_of(Ring(2, 7, head=HEAD), LIGHT) == 7 + SPARE
    assert free_of(Ring(2, 7, head=HEAD), AHEAD // 4) == 4 + SPARE
    assert free_of(Ring(2, 7, head=HEAD), AHEAD // 2 + 1) == 2 + SPARE
    assert free_of(Ring(2, 7, head=HEAD, max_bytes=AHEAD), AHEAD // 5) == 5 + SPARE


def free_of(ring: Ring, nbytes: int) -> int:
    ring.learn(nbytes)
    return free(ring)


def blocks(ring: Ring) -> int:
    return os.fstat(ring.file.fd).st_blocks * 512
