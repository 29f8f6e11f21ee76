"""What a loader leaves behind: nothing. And its memory over many epochs: flat."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from busy_support import HANG
from full_run import full_only
from interpreter_support import run
from leak_support import anonymous, assert_nothing_more, left
from loader_support import EXECUTORS, Draws, Squares, Stream, batches
from pairwise import pairwise

from penstock import DataLoader, Manifest, MPDataset, RankDataset

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:this data set has no order")


def whole(loader: Any) -> None:
    batches(loader)


def broken(loader: Any) -> None:
    for _ in loader:
        break


def twice(loader: Any) -> None:
    one = iter(loader)
    next(one)
    two = iter(loader)
    next(two)


def resumed(loader: Any) -> None:
    broken(loader)
    loader.load_state_dict(loader.state_dict())
    whole(loader)


@full_only("workers for each", but=["thread", "broken-process-True", "resumed-process-False"])
@pytest.mark.parametrize(
    ("use", "executor", "persistent"),
    pairwise(
        *([whole, broken, twice, resumed], EXECUTORS, [False, True]),
        allowed=lambda use, executor, persistent: executor != "inline" or not persistent,
    ),
)
def test_nothing_is_left(
    write_manifest: Callable[..., Path], use: Callable[[Any], None], executor: str, persistent: bool
) -> None:
    how = {"executor": executor, "num_workers": EXECUTORS[executor], "persistent_workers": persistent}
    manifest = Manifest.open(write_manifest(40))
    batches(DataLoader(Squares(4), num_workers=EXECUTORS[executor]))  # torch's own helpers start once
    gc.collect()
    before = left()
    data: list[Any] = [
        RankDataset(manifest, mini_epochs=2),
        MPDataset(manifest, batch_size=3),
        Draws(30),
        Stream(30),
    ]
    for dataset in data:
        if use is twice and persistent and dataset is data[-1]:
            continue
        loader = DataLoader(dataset, batch_size=3, **how)
        use(loader)
        del loader
    data.clear()
    del dataset
    assert_nothing_more(before)


def test_threads_end_with_the_iterator_unless_they_persist() -> None:
    before = left()
    loader = DataLoader(Squares(30), num_workers=2, executor="thread")
    iterator = iter(loader)
    next(iterator)
    assert len(left()[0] - before[0]) == 2
    del iterator
    assert_nothing_more(before)
    loader = DataLoader(Squares(30), num_workers=2, executor="thread", persistent_workers=True)
    for _ in range(3):
        batches(loader)
        assert len(left()[0] - before[0]) == 2
    loader.close()
    loader.close()
    assert_nothing_more(before)


def test_dropping_an_iterator_does_not_wait_for_what_was_prefetched() -> None:
    dropped, waited_for = threading.Event(), []

    class Waits(Squares):
        def __getitem__(self, index: int) -> int:
            if index and not dropped.wait(HANG):
                waited_for.append(index)
            return index

    loader = DataLoader(Waits(100), num_workers=2, executor="thread", prefetch_factor=9)
    iterator = iter(loader)
    next(iterator)
    del iterator
    dropped.set()
    assert not waited_for


def test_prefetching_is_bounded() -> None:
    made: list[int] = []

    class Noting(Squares):
        def __getitem__(self, index: int) -> int:
            made.append(index)
            return index

    loader = DataLoader(Noting(1000), batch_size=2, num_workers=2, executor="thread", prefetch_factor=3)
    iterator = iter(loader)
    time.sleep(0.2)
    assert len(made) <= 2 * 3 * 2
    next(iterator)
    time.sleep(0.2)
    assert len(made) <= 2 * 3 * 2 + 2


@full_only("many epochs for each", but=["inline"])
@pytest.mark.parametrize("executor", ["inline", "thread", "process"])
def test_memory_is_flat_over_epochs(write_manifest: Callable[..., Path], executor: str) -> None:
    manifest = Manifest.open(write_manifest(20_000))
    dataset = RankDataset(manifest, mini_epochs=2)
    loader = DataLoader(
        dataset,
        batch_size=500,
        executor=executor,
        num_workers=min(EXECUTORS[executor], 1),
        persistent_workers=executor != "inline",
    )
    sizes = []
    for _ in range(14):
        for _ in loader:
            loader.state_dict()
        sizes.append(anonymous())
    assert sizes[-1] - sizes[5] < 4 << 20, [size >> 10 for size in sizes]


@full_only("many epochs; a leak")
def test_persistent_worker_memory_is_flat() -> None:
    """Measured by the worker itself. Its collector leaves the parent's objects alone: to visit them copies pages."""
    loader = DataLoader(
        Anonymous(40),
        num_workers=1,
        persistent_workers=True,
        seed=1,
        shuffle=True,
        worker_init_fn=lambda _: gc.freeze(),
    )
    sizes = [max(int(batch) for batch in loader) for _ in range(25)]
    assert sizes[-1] - sizes[4] < 1 << 20, sizes


class Anonymous(Squares):
    def __getitem__(self, index: int) -> int:
        return anonymous() if index < 4 else 0  # it takes some milliseconds


PROGRAM = """
import sys, time
sys.path[:0] = {path!r}
from loader_support import Slow, Squares
from penstock import DataLoader
loader = DataLoader(Slow(200, dict.fromkeys(range(1, 200), 0.05)), num_workers=2, executor={executor!r},
                    persistent_workers={persistent})
iterator = iter(loader)
next(iterator)
print("ready", flush=True)
{end}
"""


@full_only("a program for each", but=["process-False-exit", "thread-True-error"])
@pytest.mark.parametrize(
    ("end", "code"),
    [("", 0), ("raise KeyError('the program broke')", 1), ("sys.exit(3)", 3)],
    ids=["end", "error", "exit"],
)
@pytest.mark.parametrize(("executor", "persistent"), [("thread", True), ("process", False)])
def test_programs_end_with_an_iterator_alive(end: str, code: int, executor: str, persistent: bool) -> None:
    if executor == "process" and end == "":
        pytest.skip("torch's own workers")
    path = [str(Path(__file__).parent), *[entry for entry in sys.path if entry.endswith("src")]]
    program = PROGRAM.format(path=path, executor=executor, persistent=persistent, end=end)
    done = run(["-W", "ignore", "-c", program], timeout=HANG)
    assert done.returncode == code, done.stderr
    assert done.stdout == "ready\n"
    assert ("the program broke" in done.stderr) == (code == 1)
