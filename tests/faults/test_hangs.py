"""Workers that hang: the timeout says where, the iterator goes on, and nothing waits long for them."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from entries_support import opened
from faults_support import Range, Slow, over, within
from full_run import full_only
from leak_support import children, wait_gone

from penstock import DataLoader

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Waits(Range):
    """Sample 5 takes until a file is there."""

    def __init__(self, n: int, file: Path) -> None:
        super().__init__(n)
        self.file = file

    def __getitem__(self, index: int) -> Any:
        while index == 5 and not self.file.exists():
            time.sleep(0.01)
        return index


@full_only("waits for real time-outs", but=["{}", "{'threads_per_worker': 2}"])
@pytest.mark.parametrize("how", [{}, {"threads_per_worker": 2}], ids=str)
def test_the_timeout_names_the_sample_and_the_iterator_goes_on(how: dict[str, Any], tmp_path: Path) -> None:
    go = tmp_path / "go"
    loader = DataLoader(Waits(12, go), 2, num_workers=2, timeout=0.4, **how)
    got: list[list[int]] = []
    told: list[str] = []
    with within(30), over(loader) as iterator:
        pids = [worker.pid for worker in iterator._workers]
        while len(got) < 6:
            try:
                got.append(next(iterator).tolist())
            except RuntimeError as error:
                assert opened(loader.state_dict())["sampler"]["consumed"] == 2 * len(got), "it is not counted as had"
                if len(got) == 2 and not go.exists():  # on a busy machine the others may be late, too
                    told.append(str(error))
                if len(told) == 2:
                    go.touch()
    assert got == [[2 * k, 2 * k + 1] for k in range(6)]
    assert len(told) == 2
    assert loader.stats()["failed_batches"] == 0, "it came later"
    for text in told:
        assert "DataLoader timed out after 0.4 seconds" in text
        assert "sample 5" in text
        assert any(f"pid {pid}" in text for pid in pids)


def test_a_stopped_worker_times_out_and_goes_on() -> None:
    loader = DataLoader(Slow(40, 0.01), num_workers=2, timeout=1.5, prefetch_factor=2)
    got = []
    with within(15), over(loader) as iterator:
        while not got:
            with suppress(RuntimeError):  # on a busy machine the workers may start late
                got.append(int(next(iterator)))
        stopped = iterator._workers[1].pid
        os.kill(stopped, signal.SIGSTOP)
        with pytest.raises(RuntimeError, match=rf"timed out after 1\.5 seconds.*pid {stopped}"):
            for _ in range(10):
                got.append(int(next(iterator)))
        with pytest.raises(RuntimeError, match="timed out"):
            next(iterator)
        os.kill(stopped, signal.SIGCONT)
        got += [int(batch) for batch in iterator]
    assert got == list(range(40))


@full_only("waits for real time-outs", but=["hangs"])
@pytest.mark.parametrize(("persistent", "stop"), [(False, False), (True, True)], ids=["hangs", "stopped"])
def test_close_is_bounded_though_a_worker_hangs(persistent: bool, stop: bool) -> None:
    before = children()
    loader = DataLoader(Slow(9, stuck=frozenset({1})), num_workers=2, persistent_workers=persistent)
    with within(60):
        iterator = iter(loader)
        next(iterator)
        pids = [worker.pid for worker in iterator._workers]
        if stop:
            os.kill(pids[1], signal.SIGSTOP)
        if persistent:
            loader.close()
        del iterator
        gc.collect()
        assert not wait_gone(pids, 1)
        assert children() <= before


def test_close_is_bounded_though_a_sampler_hangs() -> None:
    """In another thread, which holds what the consumer needs to hand work out."""
    inside, go = threading.Event(), threading.Event()

    def indices() -> Iterator[int]:
        yield from range(10)
        inside.set()
        go.wait(120)

    loader = DataLoader(Range(20), sampler=indices(), num_workers=2)
    ended: list[BaseException] = []

    def consume(iterator: Any) -> None:
        try:
            list(iterator)
        except BaseException as error:
            ended.append(error.with_traceback(None))

    with within(30):
        iterator = iter(loader)
        pids = [worker.pid for worker in iterator._workers]
        consumer = threading.Thread(target=consume, args=(iterator,), daemon=True)
        consumer.start()
        assert inside.wait(40)
        iterator.end(0.1)  # what close() does, which has more patience
        assert not wait_gone(pids, 1)
        go.set()
        consumer.join(40)
        assert not consumer.is_alive()
        assert not ended or "closed" in str(ended[0])


def test_a_loader_that_was_closed_in_mid_pass_starts_anew() -> None:
    loader = DataLoader(Range(20), num_workers=2, persistent_workers=True)
    with within(15):
        for _ in range(3):
            iterator = iter(loader)
            next(iterator)
            loader.close()
            with pytest.raises((RuntimeError, StopIteration)):
                list(iterator) and next(iterator)
        assert [int(batch) for batch in loader] == list(range(20))
        loader.close()
