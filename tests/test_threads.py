"""`map_blocks`: everything once, in order, and never far ahead of the consumer."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.threads import map_blocks


@settings(max_examples=50)
@given(st.integers(0, 300), st.integers(1, 50), st.sampled_from([1, 2, 5]))
def test_everything_once_and_in_order(rows: int, block: int, workers: int) -> None:
    steps: list[tuple[int, int]] = []
    results = list(map_blocks(list, rows, block=block, workers=workers, progress=lambda *step: steps.append(step)))
    assert [row for values in results for row in values] == list(range(rows))
    assert [len(values) for values in results[:-1]] == [block] * (len(results) - 1)
    assert steps == [(min(start + block, rows), rows) for start in range(0, rows, block)]


def test_order_does_not_depend_on_speed() -> None:
    def slow_first(part: range) -> int:
        time.sleep(0.05 if part.start == 0 else 0)
        return part.start

    assert list(map_blocks(slow_first, 8, block=1, workers=4)) == list(range(8))


def test_calls_run_at_the_same_time() -> None:
    barrier = threading.Barrier(3, timeout=30)
    assert len(list(map_blocks(lambda part: barrier.wait(), 3, block=1, workers=3))) == 3


def test_it_stays_near_its_consumer() -> None:
    started: list[int] = []
    results = map_blocks(lambda part: started.append(part.start), 1000, block=1, workers=2)
    for _ in range(3):
        next(results)
    time.sleep(0.05)
    assert len(started) <= 3 + 4 * 2
    results.close()
    assert len(started) <= 3 + 4 * 2


def test_an_error_comes_in_its_place_and_stops_the_rest() -> None:
    calls: list[int] = []

    def fail_at_5(part: range) -> int:
        calls.append(part.start)
        if part.start == 5:
            raise ValueError("block 5")
        return part.start

    seen: list[int] = []
    with pytest.raises(ValueError, match="block 5"):
        seen.extend(map_blocks(fail_at_5, 1000, block=1, workers=2))
    assert seen == [0, 1, 2, 3, 4]
    assert len(calls) < 50
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("penstock-files")]


def test_less_than_one_worker() -> None:
    with pytest.raises(ConfigError, match="workers"):
        next(map_blocks(list, 3, block=1, workers=0))
