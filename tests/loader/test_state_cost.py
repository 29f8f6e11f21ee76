"""What `state_dict()` costs: it asks no worker, and neither its size nor its work grows with the position."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from entries_support import closed, opened
from full_run import full_only
from interpreter_support import FULL
from loader_support import Draws
from state_support import PlainStream, StatefulStream

from penstock import DataLoader, MPDataset, RankDataset

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

HOW: dict[str, dict[str, Any]] = {
    "inline": {},
    "thread": {"num_workers": 2, "executor": "thread"},
    "process": {"num_workers": 2},
    "persistent": {"num_workers": 2, "persistent_workers": True},
}
CASES = [
    (how, shuffle)
    for how in HOW
    for shuffle in ("global", "block", None)
    # The cost of an order is this process's arithmetic: the other executors need one order.
    if FULL or shuffle == "global" or how == "inline"
]
HUGE = 10**9


def calls(function: Callable[[], Any]) -> int:
    """Calls of functions, in Python and in C, that one call makes in this thread."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.collect()  # finalizers are no work of it
    gc.disable()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def cost(loader: Any) -> tuple[int, int]:
    """Size of a state in digits and letters, and calls that it takes."""
    loader.state_dict()  # what is made once
    return len(json.dumps(loader.state_dict())), calls(loader.state_dict)


def at(state: Any, batches: int) -> Any:
    """The same state so many batches of two further on."""
    entries = opened(state)
    entries["sampler"]["consumed"] += 2 * batches
    return closed(entries)


def test_a_state_and_an_epochs_start_take_few_calls() -> None:
    """Some programs take a state after every step."""
    loader = DataLoader(range(HUGE), 256, shuffle="global", seed=0)
    iter(loader)
    assert calls(lambda: iter(loader)) <= 216
    iterator = iter(loader)
    next(iterator)
    loader.state_dict()
    assert calls(loader.state_dict) <= 75
    del iterator


@full_only("workers for each", but=["inline", "thread", "process"])
@pytest.mark.parametrize(("how", "shuffle"), CASES)
def test_it_does_not_grow_with_the_position(how: str, shuffle: str | None) -> None:
    costs = []
    for start in (0, HUGE // 5, HUGE // 2 - 1000):
        with DataLoader(Draws(HUGE), 2, shuffle=shuffle, seed=3, **HOW[how]) as loader:
            loader.load_state_dict(at(loader.state_dict(), start))
            iterator = iter(loader)
            for number in range(301):
                next(iterator)
                if number in (0, 7, 300):
                    costs.append(cost(loader))
            consumed = opened(loader.state_dict())["sampler"]["consumed"]
            assert consumed == 2 * (start + 301)
            del iterator
    sizes, work = zip(*costs, strict=True)
    assert max(sizes) - min(sizes) <= len(str(HUGE)), f"more than digits: {sizes}"
    assert max(sizes) < 700
    assert len(set(work)) == 1, work
    assert max(work) < 200


@full_only("workers for each", but=["inline"])
@pytest.mark.parametrize("how", ["inline", "process"])
def test_it_does_not_grow_in_data_sets_with_an_order(how: str, write_manifest: Callable[..., Path]) -> None:
    manifest = write_manifest(3000)
    for make in (
        lambda **options: DataLoader(RankDataset(manifest, mini_epochs=2, seed=1), 2, **options),
        lambda **options: DataLoader(MPDataset(manifest, batch_size=2, seed=1), 2, **options),
    ):
        with make(**HOW[how]) as loader:
            costs = [cost(loader) for number, _ in enumerate(loader) if number in (0, 10, 600)]
        sizes, work = zip(*costs, strict=True)
        assert len(costs) == 3
        assert max(sizes) - min(sizes) <= 8, f"more than digits: {sizes}"
        assert max(sizes) < 900
        assert len(set(work)) == 1, work


@contextmanager
def stopped(pids: list[int]) -> Iterator[None]:
    """Processes that answer nothing."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def soon(function: Callable[[], Any]) -> Any:
    """What a function returns, which should not have to wait for anybody."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()), daemon=True)
    thread.start()
    thread.join(5)
    assert not thread.is_alive(), "it waits"
    return found[0]


@pytest.mark.parametrize(("kib", "batches"), [(0, 1), (65, 2), (200, 4)])
def test_a_large_state_is_taken_every_so_many_batches(kib: int, batches: int) -> None:
    """Every batch bears 64 KiB of it, at most."""
    taken: list[int] = []

    class Large(StatefulStream):
        def state_dict(self) -> Any:
            taken.append(number)
            return {**super().state_dict(), "buffer": bytes(kib << 10)}

    number = -1
    for number, _ in enumerate(DataLoader(Large(40), 2)):  # noqa: B007
        pass
    assert {after - before for before, after in pairwise(n for n in taken if n >= 0)} == {batches}


@full_only("workers for each", but=["process-map", "process-stream with a state"])
@pytest.mark.parametrize("kind", ["map", "stream", "stream with a state"])
@pytest.mark.parametrize("how", ["process", "persistent"])
def test_it_asks_no_worker(how: str, kind: str) -> None:
    """With all workers stopped it says the same as with all of them at work, between batches and before the first."""
    make: dict[str, Callable[[], Any]] = {
        "map": lambda: DataLoader(Draws(40), 2, shuffle=True, seed=1, **HOW[how]),
        "stream": lambda: DataLoader(PlainStream(40), 2, **HOW[how]),
        "stream with a state": lambda: DataLoader(StatefulStream(40), 2, **HOW[how]),
    }
    with make[kind]() as working, make[kind]() as loader:
        iterators = []
        for one in (working, loader):
            torch.manual_seed(6)  # of which the seeds of the workers are drawn
            iterators.append(iter(one))
        others, iterator = iterators
        pids = [worker.pid for worker in iterator._workers]  # type: ignore[attr-defined]
        for _ in range(6):
            with stopped(pids):
                assert soon(loader.state_dict) == working.state_dict()
            next(iterator)
            next(others)
        del iterator, others, iterators
