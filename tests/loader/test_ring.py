"""The ring: a slot is never written to while anything refers to it, is free when nothing does, and keeps the memory
that batches usually need.
"""

from __future__ import annotations

import gc
import os
import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from process_support import allocated, deliver

from penstock.loader.executors.process.ring import SLOTS, Ring, Slot

MIB = 1 << 20


def batch_of(value: int, size: int = 5000) -> dict[str, Any]:
    return {"x": torch.full((size,), value, dtype=torch.uint8), "y": np.full(size, value, np.uint8)}


def bring(ring: Ring, nbytes: int, value: int = 1) -> Any:
    """A batch of so many bytes, made by a worker and delivered."""
    return deliver(ring, ring.lend(), torch.full((nbytes,), value, dtype=torch.uint8))


def overwrite(ring: Ring, count: int = 3) -> None:
    """Have workers write into some free slots."""
    lent = [ring.lend() for _ in range(count)]
    for number, extent in lent:
        begin = number * ring.file.room
        ring.file.map[begin : begin + extent] = b"\xff" * extent
    for number, extent in lent:
        ring.give_back(number, extent)


KEEP: dict[str, Callable[[dict[str, Any]], Any]] = {
    "the batch": lambda batch: batch,
    "a tensor": lambda batch: batch["x"],
    "an array": lambda batch: batch["y"],
    "a view": lambda batch: batch["x"][7:9],
    "a view of a view": lambda batch: batch["x"].view(-1, 100).t()[3:, 4:][::2],
    "a row": lambda batch: batch["x"].view(-1, 100).unbind()[3],
    "other type": lambda batch: batch["x"].view(torch.int32)[5:],
    "detached": lambda batch: batch["x"].detach()[1:],
    "numpy": lambda batch: batch["x"].numpy(),
    "part of numpy": lambda batch: batch["x"].numpy()[3:][::2],
    "part of the array": lambda batch: batch["y"][3:][::2],
    "array in other form": lambda batch: batch["y"].reshape(-1, 100).T.view(np.int8)[2:],
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
    """Whether all bytes are this number."""
    if isinstance(kept, dict):
        return all(looks(part, value) for part in kept.values())
    if isinstance(kept, torch.UntypedStorage):
        return bool(kept[100] == value)
    if isinstance(kept, np.flatiter):
        return bool((kept.base == value).all())
    if isinstance(kept, torch.Tensor):
        kept = kept.contiguous().view(torch.uint8).numpy()
    return bool((np.asarray(kept) == value).all())


@pytest.mark.parametrize("name", KEEP)
def test_whatever_is_kept_keeps_its_slot(name: str) -> None:
    ring = Ring()
    number, extent = ring.lend()
    kept = KEEP[name](deliver(ring, (number, extent), batch_of(7)))
    gc.collect()
    overwrite(ring)
    assert looks(kept, 7)
    del kept
    gc.collect()
    assert ring.lend()[0] == number


@given(st.data())
@settings(max_examples=40)
def test_no_slot_is_two_things_at_a_time(data: st.DataObject) -> None:
    """Deliver, keep, drop, lend and give back batches of several sizes, in any order."""
    ring = Ring()
    held: list[tuple[int, Any]] = []
    lent: list[tuple[int, int]] = []
    value = most = 0
    for _ in range(data.draw(st.integers(1, 30))):
        what = data.draw(st.sampled_from(["deliver", "deliver", "drop", "lend", "give back", "die", "cycle"]))
        if what in ("deliver", "cycle"):
            value = value % 250 + 1
            size = data.draw(st.sampled_from([5000, 5000, 200_000]))
            kept = KEEP[data.draw(st.sampled_from([*KEEP]))](deliver(ring, ring.lend(), batch_of(value, size)))
            if what == "cycle":
                circle = [kept]
                circle.append(circle)
                del circle
            else:
                held.append((value, kept))
            del kept
        elif what == "drop" and held:
            del held[data.draw(st.integers(0, len(held) - 1))]
        elif what == "lend":
            overwrite(ring)
            lent.append(ring.lend())
        elif what in ("give back", "die") and lent:
            number, extent = lent.pop(0)
            ring.give_back(number, None if what == "die" else extent)
        most = max(most, len(lent) + len(held))
        assert len({number for number, _ in lent}) == len(lent)
        assert all(looks(kept, number) for number, kept in held)
    held.clear()
    gc.collect()
    for number, extent in lent:
        ring.give_back(number, extent)
    assert ring.lend()[0] <= most + 5


def test_dropped_by_other_threads() -> None:
    ring = Ring()
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
    for number in range(600):
        value = number % 250 + 1
        waiting.put((value, deliver(ring, ring.lend(), batch_of(value))))
    for _ in threads:
        waiting.put(None)
    for thread in threads:
        thread.join()
    assert not wrong
    gc.collect()
    assert ring.lend()[0] < 600


def test_tensors_outlive_the_ring() -> None:
    ring = Ring()
    batch = deliver(ring, ring.lend(), batch_of(3))
    ring.file.close()
    del ring
    gc.collect()
    assert looks(batch, 3)
    batch["x"].add_(1)
    assert looks(batch["x"], 4)


def test_a_consumer_that_holds_all_slots_gets_none() -> None:
    ring = Ring()
    held = [ring.lease(number, 4096, 1) for number, _ in (ring.lend() for _ in range(SLOTS - 1))]
    assert ring.lend() == (0, 0)
    ring.give_back(0, 0)
    del held[5]
    assert ring.lend()[0] == 6


# Memory.


def test_slots_that_are_not_used_have_no_memory() -> None:
    ring = Ring()
    for value in range(20):
        assert looks(bring(ring, MIB, value), value)
    assert allocated(ring) == MIB


@pytest.mark.parametrize("at", [0, 20])
def test_a_batch_unlike_the_others_has_more_memory_as_long_as_it_lives(at: int) -> None:
    ring, held = Ring(), None
    for value in range(at + 30):
        batch = bring(ring, (60 if value == at else 1) * MIB, value)
        assert looks(batch, value)
        if value == at:
            held = batch
            assert 60 * MIB <= allocated(ring) <= 70 * MIB
        if value == at + 5:
            assert looks(held, at)
            assert allocated(ring) >= 61 * MIB
            held = None
        if value > at + 20:
            assert allocated(ring) <= 3.1 * MIB
        del batch


def test_batches_that_become_smaller_leave_smaller_slots() -> None:
    ring = Ring()
    held = [bring(ring, 8 * MIB) for _ in range(3)]
    assert allocated(ring) == 3 * 8 * MIB
    held.clear()
    for _ in range(128):
        bring(ring, MIB)
    assert allocated(ring) == MIB


def test_batches_that_are_large_often_keep_their_memory() -> None:
    ring = Ring()
    sizes = set()
    for value in range(64):
        bring(ring, (4 if value % 2 else 1) * MIB)
        if value > 16:
            sizes.add(allocated(ring))
    assert sizes == {4 * MIB}


def test_what_a_batch_held_before_it_grew_stays_where_it_was() -> None:
    ring = Ring()
    for value in range(5):
        number, extent = ring.lend()
        slot = Slot(ring.file, number, extent)
        tensors = []
        for part in range(6):
            tensor = slot.empty((MIB // 2,), torch.uint8)
            assert tensor is not None
            tensors.append(tensor.fill_(value * 6 + part))
        places = [slot.put(tensor.data_ptr(), tensor.nbytes, tensor.numpy) for tensor in tensors]
        assert places == [part * MIB // 2 for part in range(6)]
        assert [int(tensor[5]) for tensor in tensors] == [value * 6 + part for part in range(6)]
        ring.give_back(number, slot.extent)


def test_what_a_worker_took_that_died_is_given_back() -> None:
    ring = Ring()
    bring(ring, MIB)
    lent = [ring.lend() for _ in range(2)]
    for number, extent in lent:
        assert Slot(ring.file, number, extent).empty((20 * MIB,), torch.uint8) is not None
    assert allocated(ring) >= 40 * MIB
    for number, _ in lent:
        ring.give_back(number, None)
    assert allocated(ring) <= 2 * MIB


def test_slots_take_no_descriptors() -> None:
    ring = Ring()
    before = len(os.listdir("/proc/self/fd"))
    held = [bring(ring, 8192, value) for value in range(40)]
    assert len(os.listdir("/proc/self/fd")) == before
    assert all(looks(batch, value) for value, batch in enumerate(held))
