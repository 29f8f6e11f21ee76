"""A child that somebody forks keeps the batches that its parent held, whatever becomes of them in the parent."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from process_support import Frames, allocated, looks_like, worker_slot

from penstock import DataLoader
from penstock.loader.executors.process.forks import our_own
from penstock.loader.executors.process.pack import pack, unpack
from penstock.loader.executors.process.ring import SPARE, Ring

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:.*multi-threaded")

MIB = 1 << 20


class Child:
    """A fork that looks at something when it is told to."""

    def __init__(self, look: Callable[[], bool]) -> None:
        told, self._tell = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            code = 2
            try:
                os.close(self._tell)
                os.read(told, 1)
                code = 0 if look() else 1
            finally:
                os._exit(code)
        os.close(told)

    def end(self) -> int:
        """Have it look, and end: 0 if it is content."""
        os.write(self._tell, b"x")  # later children have a copy of it open
        os.close(self._tell)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def ring_of(depth: int = 1) -> Ring:
    ring = Ring(depth, depth, head=4096)
    ring.learn(MIB)
    return ring


def bring(ring: Ring, value: int) -> Any:
    """A batch, made by a worker and delivered."""
    slot = ring.lend()
    assert slot is not None
    packed = pack([torch.full((MIB // 2,), value, dtype=torch.uint8) for _ in range(2)], worker_slot(ring, slot))
    ring.learn(MIB)
    return unpack(packed.data, ring.lease(slot, packed.table))


def use_all(ring: Ring, rounds: int = 2) -> None:
    """Have a worker write into every slot that can be lent."""
    for _ in range(rounds):
        held = [bring(ring, 255) for _ in range(SPARE)]
        while (slot := ring.lend()) is not None:
            worker_slot(ring, slot).memory[:] = 255
            held.append([slot])
        for slot, *_ in held[SPARE:]:
            ring.give_back(slot)
        del held
        gc.collect()


@pytest.mark.parametrize("held", range(1, SPARE + 1))
def test_a_child_keeps_what_was_held_as_it_was_forked(held: int) -> None:
    ring = ring_of()
    batches = [bring(ring, value) for value in range(held)]
    child = Child(lambda: all(looks_like(batch, value) for value, batch in enumerate(batches)))
    batches.clear()
    gc.collect()
    use_all(ring)
    assert child.end() == 0


def test_what_is_large_is_not_given_back_under_a_child() -> None:
    ring = ring_of()
    for value in range(5):
        slot = ring.lend()
        assert slot is not None
        mine = worker_slot(ring, slot)
        packed = pack([torch.full((20 * MIB if value == 4 else MIB,), value, dtype=torch.uint8)], mine)
        slot.size = mine.capacity
        batch = unpack(packed.data, ring.lease(slot, packed.table))
        ring.learn(MIB)
    held = [batch]
    child = Child(lambda: looks_like(held[0], 4))
    held.clear()
    del batch
    gc.collect()
    use_all(ring)
    assert allocated(ring) >= 20 * MIB
    assert child.end() == 0
    assert allocated(ring) <= (2 + 2 * SPARE) * MIB


def test_slots_are_as_many_as_before_and_come_back_when_the_child_is_gone() -> None:
    ring = ring_of()
    held = [bring(ring, value) for value in range(SPARE)]
    children = [Child(lambda: True), Child(lambda: True)]
    held.clear()
    gc.collect()
    use_all(ring)
    assert allocated(ring) == (SPARE + 1 + SPARE) * MIB
    assert children[0].end() == 0
    assert allocated(ring) == (SPARE + 1 + SPARE) * MIB
    assert children[1].end() == 0
    assert allocated(ring) == (SPARE + 1) * MIB
    use_all(ring)
    assert allocated(ring) == (SPARE + 1) * MIB


def test_what_was_let_go_before_is_used_again() -> None:
    ring = ring_of()
    bring(ring, 1)
    child = Child(lambda: True)
    use_all(ring)
    assert allocated(ring) == (SPARE + 1) * MIB
    assert child.end() == 0


def test_our_own_forks_take_no_slots() -> None:
    ring = ring_of()
    batch = bring(ring, 1)
    with our_own():
        child = Child(lambda: True)
    del batch
    use_all(ring)
    assert allocated(ring) == (SPARE + 1) * MIB
    assert child.end() == 0


def test_a_child_that_turns_to_another_program_looks_at_nothing() -> None:
    ring = ring_of()
    batch = bring(ring, 1)
    begun, begins = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(begun)
        os.execv("/bin/sleep", ["sleep", "60"])
    os.close(begins)
    assert os.read(begun, 1) == b""
    try:
        del batch
        use_all(ring)
        assert allocated(ring) == (SPARE + 1) * MIB
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        os.close(begun)


def test_descriptors_do_not_pile_up() -> None:
    ring = ring_of()
    before = len(os.listdir("/proc/self/fd"))
    for value in range(20):
        batch = bring(ring, value)
        assert Child(lambda: True).end() == 0
        del batch
    use_all(ring)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("persistent", [False, True])
def test_a_child_of_a_program_with_a_loader(persistent: bool) -> None:
    loader = DataLoader(Frames([100_000] * 120), 2, num_workers=2, executor="process", persistent_workers=persistent)
    children = []
    for _ in range(2):
        for number, batch in enumerate(loader):
            if number in (20, 21):
                mine = batch

                def look(mine: Any = mine, number: int = number) -> bool:
                    return bool((mine[0] == 2 * number).all() and (mine[1] == 2 * number + 1).all())

                children.append(Child(look))
                del mine, look
            assert (batch[1] == (2 * number + 1) % 251).all()
            del batch
    loader.close()
    assert [child.end() for child in children] == [0] * 4


def test_workers_of_another_loader_take_no_slots() -> None:
    iterator: Any = iter(DataLoader(Frames([100_000] * 60), 2, num_workers=1, executor="process"))
    for _ in range(10):
        batch = next(iterator)
    with DataLoader(Frames([10] * 8), 2, num_workers=2, executor="process", multiprocessing_context="fork") as other:
        assert len(list(other)) == 4
    ring = iterator._batches.executor.pool.ring
    assert [slot.children for slot in ring._leased] == [[]] * len(ring._leased)
    assert ring._leased
    del batch
