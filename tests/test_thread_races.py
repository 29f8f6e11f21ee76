"""Threads that take turns every microsecond: what they share stays exact.

Without the GIL, threads meet at any instruction. With it, a short switch interval is as near to that as can be had.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import penstock as ps
from penstock.integrations.prometheus import export
from penstock.tables.lru import LruCache

pytestmark = pytest.mark.filterwarnings("ignore:sample 13", "ignore:more than 3 batches")

ROWS = 600
THREADS = 8


@pytest.fixture(autouse=True)
def quick_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def switch_quickly(worker: int) -> None:
    """Begin a worker: processes have an interval of their own."""
    sys.setswitchinterval(1e-6)


def together(work: Callable[[int], Any]) -> list[Any]:
    """Run a function in threads that begin at once; return their results, or raise the first error."""
    barrier, results = threading.Barrier(THREADS), [None] * THREADS
    errors: list[BaseException] = []

    def run(number: int) -> None:
        barrier.wait()
        try:
            results[number] = work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


class Drawn:
    """Samples of different sizes of work, each with draws of its own; some fail."""

    pure = True

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index % 97 == 13:
            raise ValueError(f"sample {index} is damaged")
        draws = ps.generator().integers(0, 1 << 30, 2 + index % 5)
        return {"index": index, "sum": int(draws.sum()), "row": np.full(500, index, np.float32)}


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Many small row groups: pieces are decoded, kept and dropped all the time."""
    path = tmp_path_factory.mktemp("table") / "rows.parquet"
    rows = pa.table({"number": range(ROWS), "text": [f"row {number}" for number in range(ROWS)]})
    pq.write_table(rows, path, row_group_size=16)
    return path


def seen(batches: Any) -> list[Any]:
    """Return batches as plain values."""
    return [
        {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
        for batch in batches
    ]


PROCESSES = {"executor": "process", "num_workers": 2, "threads_per_worker": 4, "worker_init_fn": switch_quickly}
HOW = [
    pytest.param({"executor": "thread", "num_workers": THREADS}, id="thread"),
    pytest.param(PROCESSES, id="process"),
]


@pytest.mark.parametrize("how", HOW)
def test_batches_failures_and_statistics_are_those_of_one_thread(how: dict[str, Any]) -> None:
    found, counts = [], []
    for options in ({"executor": "inline"}, how):
        with ps.DataLoader(Drawn(), batch_size=7, shuffle=True, seed=11, on_error="skip", **options) as loader:
            epochs = []
            for epoch in range(2):
                loader.set_epoch(epoch)
                epochs.append(seen(loader))
            stats = loader.stats()
        found.append(epochs)
        counts.append({name: stats[name] for name in ("batches", "samples", "bytes", "errors", "failed_batches")})
    assert found[1] == found[0]
    assert counts[1] == counts[0]


@pytest.mark.parametrize("how", HOW)
def test_rows_of_a_table_go_through_a_cache_of_two_pieces(how: dict[str, Any], table: Path) -> None:
    expected, found = (
        seen(ps.DataLoader(ps.TableDataset(table, seed=3, cache_bytes=2000), batch_size=9, **options))
        for options in ({"executor": "inline"}, how)
    )
    assert found == expected
    assert sorted(number for batch in found for number in batch["number"]) == list(range(ROWS))


def test_batches_stay_whole_while_other_threads_drop_theirs() -> None:
    """Slots of the ring come back from whichever thread drops the last tensor over them."""
    given: list[Any] = []
    changed, over = threading.Condition(), threading.Event()
    wrong: list[Any] = []
    checked = Counter[int]()

    def hold(number: int) -> None:
        while True:
            with changed:
                changed.wait_for(lambda: given or over.is_set())
                if not given:
                    return
                batch = given.pop()
                changed.notify_all()
            index, row = batch["index"].clone(), batch["row"]
            del batch  # a part of it stays
            for _ in range(5):
                if not (row == index[:, None]).all():
                    wrong.append(index)
            checked[number] += len(index)

    def consume() -> None:
        with ps.DataLoader(Drawn(), batch_size=5, num_workers=2, executor="process", on_error="skip") as loader:
            for _ in range(3):
                for batch in loader:
                    with changed:
                        changed.wait_for(lambda: not given)  # else batches are copied out of the ring
                        given.append(batch)
                        changed.notify_all()
                    del batch
        with changed:
            over.set()
            changed.notify_all()

    together(lambda number: hold(number) if number else consume())
    assert not wrong
    assert sum(checked.values()) == 3 * sum(index % 97 != 13 for index in range(ROWS))


def test_loaders_in_many_threads_over_one_dataset(table: Path) -> None:
    dataset = ps.TableDataset(table, seed=3, cache_bytes=2000)

    def load(number: int) -> list[Any]:
        return seen(ps.DataLoader(dataset, batch_size=16, executor="thread", num_workers=1 + number % 2))

    results = together(load)
    assert all(result == results[0] for result in results)


def test_a_cache_makes_each_value_once_and_knows_its_size() -> None:
    kept: LruCache[list[int]] = LruCache(1 << 20)
    made = Counter[int]()

    def make(key: int) -> tuple[list[int], int]:
        made[key] += 1
        time.sleep(0)
        return [key], 10

    def get(number: int) -> None:
        for turn in range(400):
            key = (turn * 7 + number) % 60
            assert kept.get(key, partial(make, key)) == [key]

    together(get)
    assert made == dict.fromkeys(range(60), 1)
    assert (kept.made, kept._held) == (60, 600)


def test_a_small_cache_never_loses_count_of_its_bytes() -> None:
    kept: LruCache[int] = LruCache(55)

    def get(number: int) -> None:
        for turn in range(3000):
            key = (turn * 7 + number) % 60
            assert kept.get(key, partial(tuple, (key, 10))) == key

    together(get)
    assert kept._held == 10 * len(kept._values) <= 55


def test_loaders_exported_by_two_threads_share_a_collector() -> None:
    """The registry pauses in the middle of a registration, so that both threads are in it unless one waits."""
    prometheus = pytest.importorskip("prometheus_client")

    class SlowRegistry(prometheus.CollectorRegistry):  # type: ignore[misc, name-defined]
        def register(self, collector: Any) -> None:
            time.sleep(0.2)
            super().register(collector)

    registry, start = SlowRegistry(), threading.Barrier(2)
    loaders = [ps.DataLoader(range(4), batch_size=2) for _ in range(2)]
    failures: list[BaseException] = []

    def run(loader: ps.DataLoader[Any]) -> None:
        start.wait()
        try:
            export(loader, registry=registry)
        except ValueError as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(loader,)) for loader in loaders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert [registry.get_sample_value("penstock_workers", {"loader": name}) for name in "01"] == [0, 0]
