"""The meter of throughput, by a clock that the test turns."""

from __future__ import annotations

import pytest

from penstock.loader.messages import BatchMetrics
from penstock.loader.throughput import ThroughputMeter


def spend(meter: ThroughputMeter, count: int, *, wait: float, train: float, now: float = 0.0) -> tuple[int, float]:
    """Give it so many batches at most; how many it took, and the time then."""
    for number in range(count):
        asked = now + train * (number > 0)
        now = asked + wait
        if meter.add(BatchMetrics(samples=4, fetch=0.01, collate=0.01), asked, now, depth=2):
            return number + 1, now
    return count, now


def test_rounds_are_counted_from_the_first_batch_of_every_worker_on() -> None:
    meter = ThroughputMeter(4, seconds=0.8)
    meter.begin(0.0)
    count, _ = spend(meter, 1000, wait=0.05, train=0.05)
    found = meter.found
    assert count == 4 + found.batches
    assert found.batches % 4 == 0
    assert found.samples == 4 * found.batches
    assert 0.8 <= found.seconds < 0.8 + 4 * 0.1
    assert found.wait == pytest.approx(found.train) == pytest.approx(0.05 * found.batches)
    assert found.metrics.fetch == pytest.approx(0.01 * found.batches)
    assert meter.first == pytest.approx(0.05)


def test_batches_in_flight_before_a_change_do_not_count() -> None:
    meter = ThroughputMeter(2, seconds=0.1, ahead=3)
    assert spend(meter, 1000, wait=0.1, train=0.0)[0] == 3 + 2 + 4


def test_slow_batches_need_one_round() -> None:
    meter = ThroughputMeter(2, seconds=0.6)
    assert spend(meter, 1000, wait=2.0, train=0.0)[0] == 2 + 2


def test_a_part_of_a_round_has_to_do_where_time_is_up() -> None:
    for limit, count in ((5.0, 8 + 3), (1000.0, 8 + 8)):
        meter = ThroughputMeter(8, seconds=0.6, limit=limit)
        assert spend(meter, 1000, wait=2.0, train=0.0)[0] == count
        assert meter.found.rate == pytest.approx(2.0)


def test_a_pause_of_the_program_is_no_training() -> None:
    meter = ThroughputMeter(1, seconds=0.8)
    _, now = spend(meter, 30, wait=0.01, train=0.01)
    # Validation; and everything is ready.
    assert not meter.add(BatchMetrics(4), now + 9.0, now + 9.0)
    spend(meter, 1000, wait=0.01, train=0.01, now=now + 9.0)
    assert meter.found.rate == pytest.approx(4 / 0.02, rel=0.05)


def test_short_passes_add_up() -> None:
    meter = ThroughputMeter(4, seconds=0.8)
    for number in range(9):
        meter.begin(0.0)
        assert spend(meter, 3, wait=0.1, train=0.0)[0] == 3
        meter.end()
        assert meter.found.batches == 3 * (number + 1)
        assert meter.enough == (meter.found.batches >= 8)
        if meter.enough:
            break
    assert meter.found.rate == pytest.approx(40)


def test_samples_that_failed_are_not_kept() -> None:
    meter = ThroughputMeter(1, seconds=0.1)
    for number in range(4):
        meter.add(BatchMetrics(1, failures=[object()]), number, number)
    assert meter.found.metrics.failures == []


def test_batches_that_a_pause_left_ready_do_not_count() -> None:
    meter = ThroughputMeter(1, seconds=10.0)
    _, now = spend(meter, 10, wait=0.1, train=0.0)
    before = meter.found.batches
    for number in range(9):
        now += 9.0 if number == 0 else 0.01
        meter.add(BatchMetrics(4), now, now, depth=8)
    assert meter.found.batches == before
    meter.add(BatchMetrics(4), now, now + 0.1)
    assert meter.found.batches == before + 1
