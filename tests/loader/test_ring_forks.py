"""A child that somebody forks keeps the batches that its parent held, whatever becomes of them in the parent."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from process_support import Frames, allocated, deliver, looks_like

from penstock import DataLoader
from penstock.loader.executors.process.ring import Ring, fork

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:.*multi-threaded")

MIB = 1 << 20
USED = 5


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


def bring(ring: Ring, value: int, nbytes: int = MIB) -> Any:
    """A batch, made by a worker and delivered."""
    return deliver(ring, ring.lend(), [torch.full((nbytes // 2,), value, dtype=torch.uint8) for _ in range(2)])


def use_all(ring: Ring) -> None:
    """Have workers write into as many slots as are ever used."""
    for _ in range(2):
        held = [bring(ring, 255) for _ in range(USED)]
        del held
        gc.collect()


def test_a_child_keeps_what_was_held_as_it_was_forked() -> None:
    ring = Ring()
    batches = [bring(ring, value) for value in range(3)]
    child = Child(lambda: all(looks_like(batch, value) for value, batch in enumerate(batches)))
    batches.clear()
    gc.collect()
    use_all(ring)
    assert child.end() == 0


def test_what_is_large_is_not_given_back_under_a_child() -> None:
    ring = Ring()
    for value in range(5):
        batch = bring(ring, value, 20 * MIB if value == 4 else MIB)
    held = [batch]
    child = Child(lambda: looks_like(held[0], 4))
    held.clear()
    del batch
    gc.collect()
    use_all(ring)
    assert allocated(ring) >= 20 * MIB
    assert child.end() == 0
    assert allocated(ring) <= (USED + 1) * MIB


def test_slots_come_back_when_all_children_are_gone() -> None:
    ring = Ring()
    held = [bring(ring, value) for value in range(3)]
    children = [Child(lambda: True), Child(lambda: True)]
    held.clear()
    gc.collect()
    use_all(ring)
    assert allocated(ring) == (3 + USED) * MIB
    assert children[0].end() == 0
    assert allocated(ring) == (3 + USED) * MIB
    assert children[1].end() == 0
    assert allocated(ring) == USED * MIB
    use_all(ring)
    assert allocated(ring) == USED * MIB


@pytest.mark.parametrize("ours", [False, True])
def test_what_no_child_reads_is_used_again(ours: bool) -> None:
    """Batches that were dropped before the fork, and those that our own workers do not look at."""
    ring = Ring()
    batch = bring(ring, 1)
    if not ours:
        del batch
    fork.ours = ours
    try:
        child = Child(lambda: True)
    finally:
        fork.ours = False
    batch = None
    use_all(ring)
    assert allocated(ring) == USED * MIB
    assert child.end() == 0


def test_a_child_that_turns_to_another_program_looks_at_nothing() -> None:
    ring = Ring()
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
        assert allocated(ring) == USED * MIB
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        os.close(begun)


@pytest.mark.parametrize("keeps", [False, True])
def test_descriptors_do_not_pile_up(keeps: bool) -> None:
    ring = Ring()
    kept = [bring(ring, 1)] if keeps else []
    before = len(os.listdir("/proc/self/fd"))
    for value in range(20):
        batch = bring(ring, value)
        assert Child(lambda: True).end() == 0
        del batch
    use_all(ring)
    assert len(os.listdir("/proc/self/fd")) <= before + len(kept)


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
    assert not iterator._batches.executor.ring._children
    del batch
