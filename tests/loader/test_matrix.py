"""One truth: whatever makes the batches, however often they are interrupted, they are the same bits."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from busy_support import HANG
from full_run import full_only
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter_support import FULL, run
from matrix_support import DATA, bits
from pairwise import covering

from penstock import DataLoader

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:.*are being kept")

N, SIZE, EPOCHS = 26, 4, 3
PER_EPOCH = 7


def process(count: int, method: str = "fork", **how: Any) -> dict[str, Any]:
    return {"executor": "process", "num_workers": count, "multiprocessing_context": method, **how}


def thread(count: int, **how: Any) -> dict[str, Any]:
    return {"executor": "thread", "num_workers": count, **how}


HOW: dict[str, dict[str, Any]] = {
    "inline": {},
    "auto 2": {"num_workers": 2},
    "auto": {"num_workers": "auto"},
    "auto persistent": {"num_workers": "auto", "persistent_workers": True},
    **{f"thread {n}": thread(n) for n in (1, 2, 5)},
    "thread 2 persistent": thread(2, persistent_workers=True, prefetch_factor=4),
    **{f"fork {n}": process(n) for n in (1, 2, 5)},
    "fork 2 persistent": process(2, persistent_workers=True),
    "fork 5 persistent": process(5, persistent_workers=True, prefetch_factor=1),
    "fork 2 limit": process(2, max_bytes_in_flight=100_000),
    **{f"fork {n} x 3": process(n, threads_per_worker=3) for n in (1, 2)},
    "fork 2 x 3 persistent": process(2, threads_per_worker=3, persistent_workers=True),
    **{f"forkserver {n}": process(n, "forkserver") for n in (1, 2)},
    "forkserver 5 persistent": process(5, "forkserver", persistent_workers=True),
    "forkserver 1 x 3": process(1, "forkserver", threads_per_worker=3),
}


def allowed(kind: str, start: str, workers: int, persistent: bool, threads: int, ahead: int, limit: int | None) -> bool:
    """Whether a loader takes these options together, and promises the same batches."""
    if start == "inline":
        return (workers, persistent, threads, ahead, limit) == (1, False, 1, 2, None)
    if start == "thread":
        return kind != "impure" and threads == 1
    return kind != "impure" or threads == 1


def options(start: str, workers: int, persistent: bool, threads: int, ahead: int, limit: int | None) -> dict[str, Any]:
    """Return arguments of a loader."""
    if start == "inline":
        return {}
    how: dict[str, Any] = {"persistent_workers": persistent, "prefetch_factor": ahead, "max_bytes_in_flight": limit}
    if start == "thread":
        return thread(workers, **how)
    return process(workers, start, threads_per_worker=threads, **how)


AXES: dict[str, list[Any]] = {
    "kind": list(DATA),
    "start": ["inline", "thread", "fork", "forkserver"],
    "workers": [1, 2, 5],
    "persistent": [False, True],
    "threads": [1, 3],
    "ahead": [1, 2, 4],
    "limit": [None, 100_000],
}
PAIRS = [
    pytest.param(kind, options(*how), id="-".join(map(str, (kind, *how))))
    for kind, *how in covering(*AXES.values(), allowed=allowed)
]
MATRIX = [
    pytest.param(kind, how, id=f"{kind}-{name}")
    for name, how in HOW.items()
    for kind in DATA
    if FULL or "auto" in name  # which has no options of its own
]

SPAWN = {
    "spawn 1 persistent": process(1, "spawn", persistent_workers=True),
    "spawn 2 x 2": process(2, "spawn", persistent_workers=True, threads_per_worker=2),
}


def in_threads(how: dict[str, Any]) -> bool:
    return how.get("executor") == "thread" or how.get("threads_per_worker", 1) > 1


def make(kind: str, how: dict[str, Any]) -> DataLoader[Any]:
    return DataLoader(DATA[kind](N), SIZE, shuffle=True, seed=11, **how)


@pytest.fixture(scope="module")
def truth() -> dict[str, list[list[Any]]]:
    """By data set: for each epoch the batches made inline."""
    found = {}
    for kind in DATA:
        loader = make(kind, {})
        found[kind] = [[bits(batch) for batch in loader] for _ in range(EPOCHS)]
        assert [len(epoch) for epoch in found[kind]] == [PER_EPOCH] * EPOCHS
        assert len({str(batch) for epoch in found[kind] for batch in epoch}) == PER_EPOCH * EPOCHS
    return found


@contextmanager
def untouched(passes: int, loader: DataLoader[Any]) -> Iterator[None]:
    """Python's and NumPy's generators stay as they are, torch's moves by one draw for each iterator, as in torch."""
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    before = random.getstate(), str(np.random.get_state())
    yield
    assert (random.getstate(), str(np.random.get_state())) == before
    drawn = torch.get_rng_state()
    torch.manual_seed(3)
    kept = loader.persistent_workers and loader.executor != "thread"
    for _ in range(1 if kept else passes):
        torch.empty((), dtype=torch.int64).random_()
    assert torch.equal(drawn, torch.get_rng_state())


@pytest.mark.parametrize(("kind", "how"), [*PAIRS, *MATRIX])
def test_every_executor_makes_the_same_batches(truth: Any, kind: str, how: dict[str, Any]) -> None:
    if kind == "impure" and in_threads(how):
        pytest.skip("threads promise penstock.generator only")
    loader = make(kind, how)
    with untouched(EPOCHS, loader), loader:
        for expected in truth[kind]:
            assert [bits(batch) for batch in loader] == expected


@pytest.mark.skipif(not FULL, reason="`test_one_truth` spawns workers, too; PENSTOCK_TEST_FULL=1")
@pytest.mark.parametrize("name", SPAWN)
def test_spawned_workers_make_the_same_batches(truth: Any, name: str) -> None:
    kind = "images" if "x" in name else "impure"
    loader = make(kind, SPAWN[name])
    with untouched(EPOCHS, loader), loader:
        for expected in truth[kind]:
            assert [bits(batch) for batch in loader] == expected


# Interruptions.

RESUMED = [
    {},
    thread(2),
    thread(5, persistent_workers=True),
    process(1),
    process(2),
    process(2, persistent_workers=True),
    process(5, prefetch_factor=1),
    process(1, threads_per_worker=3),
    process(2, on_worker_death="restart", max_bytes_in_flight=100_000),
    {"num_workers": "auto"},
]

STOPS = st.lists(
    st.tuples(st.sampled_from(RESUMED), st.integers(0, PER_EPOCH + 3), st.sampled_from(["new", "used", "iterated"])),
    min_size=1,
    max_size=5,
)


@full_only("many starts of workers; test_random_programs.py has interruptions at any place")
@given(kind=st.sampled_from(sorted(DATA)), stops=STOPS)
@settings(max_examples=14 if FULL else 7, deadline=None)
def test_any_interruptions_and_resumes(truth: Any, kind: str, stops: list[Any]) -> None:
    """Each stage goes on from the state of the one before, with another executor, in a loader that is new, that has
    been somewhere else, or that iterates already.
    """
    expected = [batch for epoch in truth[kind] for batch in epoch]
    state, done = make(kind, {}).state_dict(), 0
    for how, count, use in [*stops, ({}, len(expected), "new")]:
        if kind == "impure" and in_threads(how):
            how = process(1)
        count = min(count, len(expected) - done)
        with make(kind, how) as loader:
            if use != "new":
                old = iter(loader)
                next(old)
                if use == "used":
                    del old
            loader.load_state_dict(json.loads(json.dumps(state)))
            got: list[Any] = []
            while len(got) < count:
                iterator = iter(loader)
                for batch in iterator:
                    got.append(bits(batch))
                    if len(got) == count:
                        break
            assert got == expected[done : done + count]
            done += count
            state = loader.state_dict()
            old = iterator = None


@pytest.mark.parametrize("name", ["thread 2", "fork 2", "fork 5 persistent", "fork 2 x 3 persistent", "forkserver 1"])
def test_states_are_those_of_the_batches_had(name: str) -> None:
    """The same after batch k in every executor, however much is prefetched meanwhile; and asked for twice, the same."""
    inline, other = make("pure", {}), make("pure", HOW[name])
    assert inline.state_dict() == other.state_dict()
    with other:
        for _ in range(2):
            for one, two in zip(inline, other, strict=True):
                assert bits(one) == bits(two)
                time.sleep(0.002)
                assert inline.state_dict() == other.state_dict() == other.state_dict()
            assert inline.state_dict() == other.state_dict()


def test_state_dict_is_small_and_quick() -> None:
    """Its size does not depend on the position; its time is printed, not asserted (the bar is 50 us)."""
    for name in ("inline", "thread 2", "fork 2"):
        loader = DataLoader(DATA["pure"](10_000_000), 2, shuffle=True, seed=1, **HOW[name])
        sizes = []
        with loader:
            iterator = iter(loader)
            for k, _ in enumerate(iterator):
                sizes.append(len(json.dumps(loader.state_dict())))
                if k == 300:
                    break
            begin = time.perf_counter()
            for _ in range(1000):
                loader.state_dict()
            print(f"state_dict() while {name} works: {(time.perf_counter() - begin) * 1e3:.1f} us, {sizes[-1]} bytes")
            del iterator
        assert max(sizes) - min(sizes) <= 4, "digits"
        assert max(sizes) < 1000


PROGRAM = """
import hashlib, json, sys
sys.path[:0] = {path!r}
from matrix_support import DATA, bits
from penstock import DataLoader
if __name__ == "__main__":
    loader = DataLoader(DATA[{kind!r}]({n}), {size}, shuffle=True, seed=11, **{how!r})
    loader.load_state_dict(json.loads({state!r}))
    for _ in range(2):
        for batch in loader:
            print(hashlib.sha256(str(bits(batch)).encode()).hexdigest())
"""


@pytest.mark.parametrize(("kind", "name"), [("impure", "fork 2"), ("images", "fork 2 x 3 persistent")])
def test_a_new_process_goes_on(truth: Any, kind: str, name: str) -> None:
    import hashlib

    loader = make(kind, HOW["fork 5"])
    with loader:
        iterator = iter(loader)
        for _ in range(3):
            next(iterator)
        state = json.dumps(loader.state_dict())
        del iterator
    path = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "src")]
    program = PROGRAM.format(path=path, kind=kind, n=N, size=SIZE, how=HOW[name], state=state)
    done = run(["-W", "ignore", "-c", program], timeout=HANG)
    assert done.returncode == 0, done.stderr
    expected = truth[kind][0][3:] + truth[kind][1]
    assert done.stdout.split() == [hashlib.sha256(str(batch).encode()).hexdigest() for batch in expected]
