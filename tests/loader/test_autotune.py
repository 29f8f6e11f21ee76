"""Which numbers of workers are tried and which one is chosen, by results that are computed: no processes, no clock."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.loader.autotune import Autotuner, Throughput
from penstock.loader.messages import BatchMetrics

SAMPLES = 1000


class Machine:
    """What a run takes for a sample: work that computes for some of its time, handing over, the training."""

    def __init__(self, *, cores: int, work: float, computing: float, train: float, hand: float = 0.0) -> None:
        self.cores = cores
        self.work = work
        self.computing = computing
        self.train = train
        self.hand = hand

    def measure(self, workers: int) -> Throughput:
        cpu, wait = self.work * self.computing, self.work
        if workers:
            each = max(self.work / workers, cpu / min(self.cores, workers))
            wait = max(0.0, each - self.train) + self.hand
        metrics = BatchMetrics(SAMPLES, fetch=SAMPLES * self.work, cpu=SAMPLES * cpu)
        return Throughput(workers, SAMPLES // 10, SAMPLES * wait, SAMPLES * self.train, metrics)


def search(tuner: Autotuner, machine: Any) -> list[int]:
    """What was tried; the choice is the tuner's current number."""
    tried = []
    while tuner.chosen is None:
        tried.append(tuner.workers)
        tuner.note(machine.measure(tuner.workers))
        assert len(tried) < 30, tried
    assert tuner.chosen == tuner.workers
    return tried


def tuner_of(machine: Machine, *, inline: bool = False, **options: Any) -> Autotuner:
    return Autotuner("process", **{"inline": inline, "cores": machine.cores, **options})


def test_one_worker_is_enough_where_the_training_hardly_waits_for_it() -> None:
    machine = Machine(cores=8, work=0.9e-3, computing=1.0, train=1e-3)
    tuner = tuner_of(machine, inline=True)
    assert search(tuner, machine) == [1]
    assert tuner.chosen == 1
    assert tuner.stats()["chosen"] == {"executor": "process", "workers": 1}
    assert tuner.why.endswith("; more workers would gain almost nothing")


@pytest.mark.parametrize(("cores", "tried"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (16, [1, 2, 4, 8, 16])])
def test_a_data_set_that_computes_gets_the_cores(cores: int, tried: list[int]) -> None:
    machine = Machine(cores=cores, work=1.0, computing=1.0, train=1e-6)
    tuner = tuner_of(machine)
    assert search(tuner, machine) == tried
    assert tuner.chosen == cores
    assert tuner.why.endswith("; this rank may have no more workers")


def test_a_count_that_cannot_bring_a_tenth_is_not_tried() -> None:
    machine = Machine(cores=17, work=1.0, computing=1.0, train=1e-6)
    assert search(tuner_of(machine), machine) == [1, 2, 4, 8, 16]


def test_a_data_set_that_waits_gets_more_as_long_as_that_helps() -> None:
    machine = Machine(cores=2, work=1.0, computing=0.02, train=1e-6)
    tuner = tuner_of(machine)
    assert search(tuner, machine) == [1, 2, 4, 8, 16, 32, 64]
    assert tuner.chosen == 64
    machine = Machine(cores=2, work=1.0, computing=0.2, train=1e-6)
    tuner = tuner_of(machine)
    assert search(tuner, machine) == [1, 2, 4, 8, 16, 32, 64]
    assert tuner.chosen == 16  # two cores have no more time than that
    assert tuner.why.endswith("; more workers are not faster")


def test_a_few_slow_batches_tell_that_a_data_set_computes() -> None:
    """Otherwise a noisy measurement chooses more processes than cores."""

    class Slow(Machine):
        def measure(self, workers: int) -> Throughput:
            metrics = BatchMetrics(5 * 64, fetch=1.0, cpu=0.9)
            return Throughput(workers, 5, 1.0 / workers, 0.0, metrics)  # noise that favours more workers

    machine = Slow(cores=2, work=0.0, computing=1.0, train=0.0)
    assert search(tuner_of(machine), machine) == [1, 2]


@pytest.mark.parametrize("computing", [0.02, 1.0])
def test_eight_ranks_of_a_node_share_its_cores(computing: float) -> None:
    machine = Machine(cores=96, work=1.0, computing=computing, train=1e-6)
    assert max(search(tuner_of(machine, ranks=8), machine)) == 96 // 8


@pytest.mark.parametrize("cores", [1, 4])
def test_every_rank_has_a_worker_where_there_are_more_ranks_than_cores(cores: int) -> None:
    machine = Machine(cores=cores, work=1.0, computing=1.0, train=1e-6)
    assert search(tuner_of(machine, ranks=100), machine) == [1]


def test_no_more_workers_than_there_is_memory_for() -> None:
    machine = Machine(cores=16, work=1.0, computing=1.0, train=1e-6)
    tuner = tuner_of(machine)
    tuner.memory_for = 5
    assert search(tuner, machine) == [1, 2, 4, 5]


def test_no_more_workers_than_batches_in_an_epoch() -> None:
    machine = Machine(cores=16, work=1.0, computing=1.0, train=1e-6)
    tuner = tuner_of(machine)
    tuner.length = 4
    assert search(tuner, machine) == [1, 2, 4]


def test_where_no_number_of_workers_helps_it_is_inline() -> None:
    machine = Machine(cores=4, work=1e-5, computing=1.0, train=1e-5, hand=1e-4)
    tuner = tuner_of(machine, inline=True)
    assert search(tuner, machine) == [1, 2, 4]
    assert tuner.chosen == 0
    assert tuner.stats()["chosen"] == {"executor": "inline", "workers": 0}
    assert "estimated from one worker; no number of workers is faster" in tuner.why
    tried = [(one["workers"], one["estimated"]) for one in tuner.stats()["tried"]]
    assert tried == [(1, False), (2, False), (4, False), (0, True)]
    tuner = tuner_of(machine)
    search(tuner, machine)
    assert tuner.chosen


def test_of_numbers_as_good_as_the_best_the_smallest_is_chosen() -> None:
    class Close(Machine):
        def measure(self, workers: int) -> Throughput:
            rate = {1: 850, 2: 975, 4: 1000, 8: 1001}[workers]
            metrics = BatchMetrics(SAMPLES, fetch=1.0, cpu=1.0)
            return Throughput(workers, SAMPLES // 10, SAMPLES / rate, 0.0, metrics)

    machine = Close(cores=8, work=0.0, computing=1.0, train=0.0)
    tuner = tuner_of(machine)
    assert search(tuner, machine) == [1, 2, 4, 8]
    assert tuner.chosen == 2


def test_one_bad_measurement_does_not_end_the_search() -> None:
    class Busy(Machine):
        def measure(self, workers: int) -> Throughput:
            found = super().measure(workers)
            found.wait *= 10 if workers == 2 else 1
            return found

    machine = Busy(cores=8, work=1.0, computing=1.0, train=1e-6)
    tuner = tuner_of(machine)
    assert search(tuner, machine) == [1, 2, 4, 8]
    assert tuner.chosen == 8


def test_one_bad_measurement_of_the_last_number_does_not_decide() -> None:
    class Busy(Machine):
        bad = True

        def measure(self, workers: int) -> Throughput:
            found = super().measure(workers)
            if workers == 2 and self.bad:
                self.bad, found.wait = False, found.wait * 10
            return found

    machine = Busy(cores=2, work=1.0, computing=1.0, train=1e-6)
    tuner = tuner_of(machine)
    assert search(tuner, machine) == [1, 2, 2]
    assert tuner.chosen == 2


def test_starting_workers_counts_where_passes_are_short_unless_they_stay() -> None:
    machine = Machine(cores=2, work=1e-3, computing=1.0, train=1e-6)
    for start, persistent, chosen in ((0.0, False, 2), (0.4, False, 0), (0.4, True, 2)):
        tuner = tuner_of(machine, inline=True, persistent=persistent)
        tuner.length = 10  # batches of ten samples: 0.1 s of work
        tuner.start = start
        search(tuner, machine)
        assert tuner.chosen == chosen


def test_a_number_that_fails_is_not_chosen() -> None:
    machine = Machine(cores=8, work=1.0, computing=1.0, train=1e-6)
    tuner = tuner_of(machine)
    while tuner.chosen is None:
        if tuner.workers == 8:
            tuner.fail(OSError("no more"))
        else:
            tuner.note(machine.measure(tuner.workers))
    assert tuner.chosen == 4
    assert [tried["error"] for tried in tuner.stats()["tried"]] == ["", "", "", "OSError: no more"]


@given(
    cores=st.integers(1, 80),
    work=st.floats(1e-6, 1.0),
    computing=st.floats(0.0, 1.0),
    train=st.floats(1e-6, 1.0),
    hand=st.floats(0.0, 1e-3),
    inline=st.booleans(),
    ranks=st.integers(1, 16),
    length=st.none() | st.integers(0, 100),
    memory=st.none() | st.integers(0, 100),
)
def test_it_ends_within_its_limits_and_with_one_of_the_best(
    inline: bool, ranks: int, length: int | None, memory: int | None, **numbers: Any
) -> None:
    machine = Machine(**numbers)
    tuner = tuner_of(machine, inline=inline, ranks=ranks)
    tuner.length, tuner.memory_for = length, memory
    tried = search(tuner, machine)
    assert len(tried) <= len(set(tried)) + 1 <= 9
    assert max(tried) <= max(1, max(64, machine.cores) // ranks)
    assert memory is None or max(tried) <= max(1, memory)
    best = max(machine.measure(workers).rate() for workers in tried)
    assert tuner.chosen is not None
    assert machine.measure(tuner.chosen).rate() >= 0.9 * best


# The measurement, by a clock that the test turns.


def spend(tuner: Autotuner, count: int, *, wait: float, train: float, now: float) -> tuple[int, float]:
    """Give it so many batches at most; how many it took, and the time then."""
    for number in range(count):
        asked = now + train * (number > 0)
        now = asked + wait
        if tuner._measure(BatchMetrics(samples=4, fetch=0.01, failures=[object()]), asked, now, 2):
            return number + 1, now
    return count, now


def measuring(workers: int) -> Autotuner:
    tuner = Autotuner("process", inline=False, cores=8)
    tuner._now = Throughput(workers)
    return tuner


def test_full_rounds_are_counted() -> None:
    tuner = measuring(4)
    count, _ = spend(tuner, 1000, wait=0.05, train=0.05, now=0.0)
    found = tuner._now
    assert count == 2 + found.batches
    assert found.batches % 4 == 0
    assert found.metrics.samples == 4 * found.batches
    assert 0.8 <= found.wait + found.train < 0.8 + 4 * 0.1
    assert found.wait == pytest.approx(found.train) == pytest.approx(0.05 * found.batches)
    assert found.metrics.fetch == pytest.approx(0.01 * found.batches)
    assert found.metrics.failures == []
    assert tuner.start == pytest.approx(0.05)


def test_a_pause_of_the_program_is_no_training() -> None:
    tuner = measuring(1)
    _, now = spend(tuner, 30, wait=0.01, train=0.01, now=0.0)
    # Validation; and what is ready then tells nothing.
    before = tuner._now.batches
    assert not tuner._measure(BatchMetrics(4), now + 9.0, now + 9.0, 2)
    _, now = spend(tuner, 2, wait=0.0, train=0.0, now=now + 9.0)
    assert tuner._now.batches == before
    spend(tuner, 1000, wait=0.01, train=0.01, now=now)
    assert tuner._now.rate() == pytest.approx(4 / 0.02, rel=0.05)


def test_the_first_step_of_the_training_does_not_count() -> None:
    tuner = measuring(1)
    tuner._measure(BatchMetrics(4), 0.0, 0.1, 2)
    tuner._measure(BatchMetrics(4), 60.0, 60.0, 2)  # it compiles a model
    spend(tuner, 1000, wait=0.1, train=0.0, now=60.0)
    assert tuner._now.waiting == 1


class Epoch:
    """Stands for the window of an epoch iterator."""


def test_short_epochs_add_up() -> None:
    tuner, now = measuring(2), 0.0
    for epochs in range(1, 4):
        epoch: Any = Epoch()
        tuner.begin(epoch, now, 3)
        # Its workers take 0.3 s to start, which is neither waiting nor training.
        _, now = spend(tuner, 3, wait=0.1, train=0.0, now=now + 0.3)
        assert tuner.start == pytest.approx(0.4)
        assert tuner._now.batches == 2 * epochs - 1
        assert tuner._now.wait + tuner._now.train == pytest.approx(0.1 * tuner._now.batches)
